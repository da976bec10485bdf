"""Records the hidden states of a model's passes, which trained drafters read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hdtool.data.errors import FamilyError


class HiddenStates:
    """Records the input of a model's output layer in each pass, and optionally the outputs of decoder layers."""

    def __init__(self) -> None:
        self.is_watched = False
        self.last_pass: torch.Tensor | None = None
        """Hidden states of the last pass, shape ``[batch, tokens, columns]``."""
        self.layers: tuple[int, ...] = ()
        """Decoder layers whose outputs follow the output layer's input in the columns of ``last_pass``."""
        self._layer_outputs: dict[int, torch.Tensor] = {}
        self._width = 0

    def watch(self, model: torch.nn.Module, kind: str, run: Callable[[], object]) -> None:
        """From now on, record the hidden states of each pass of a model.

        ``run`` must run a forward pass, and ``kind`` is the model's type, for messages. Raise a ``FamilyError`` if the
        model returns no hidden states.
        """
        module_of_hidden(model, kind, run).register_forward_hook(Recorder(self))
        self.is_watched = True

    def watch_layers(self, decoder: torch.nn.Module, layers: Sequence[int]) -> None:
        """From now on, also record the outputs of these decoder layers; raise ``FamilyError`` if one doesn't exist."""
        decoder_layers = getattr(decoder, "layers", ())
        if not layers or not all(0 <= layer < len(decoder_layers) for layer in layers):
            raise FamilyError(
                f"layers {', '.join(map(str, layers))} are asked for, and this model has {len(decoder_layers)}"
            )
        for layer in dict.fromkeys(layers):
            if layer not in self.layers:
                decoder_layers[layer].register_forward_hook(Recorder(self, layer))
        self.layers += tuple(layers)

    def columns(self, layers: Sequence[int] = ()) -> slice | None:
        """Return a slice of the columns of ``last_pass`` that hold the outputs of ``layers``, or None.

        Without ``layers``, the slice selects the output layer's input. Return None if nothing is watched, or if the
        layers aren't recorded in this order without others between them.
        """
        if not self.is_watched:
            return None
        if not self._width:
            assert self.last_pass is not None
            self._width = self.last_pass.shape[-1] // (1 + len(self.layers))
        for first in range(len(self.layers) - len(layers) + 1):
            if not layers:
                return slice(0, self._width)
            if self.layers[first : first + len(layers)] == tuple(layers):
                return slice(self._width * (1 + first), self._width * (1 + first + len(layers)))
        return None

    def record(self, layer: int | None, returned: object) -> None:
        """Record the output of a layer, or of the module that returns the output layer's input."""
        if layer is not None:
            hidden = returned[0] if isinstance(returned, tuple) else returned
            assert isinstance(hidden, torch.Tensor)
            self._layer_outputs[layer] = hidden
        elif (hidden := hidden_in(returned)) is not None:
            parts = [hidden, *(self._layer_outputs[layer] for layer in self.layers)]
            self.last_pass = torch.cat(parts, dim=-1) if len(parts) > 1 else hidden

    def slot_rows(self, slot: int, rows: int) -> torch.Tensor | None:
        """Return the hidden states of the first ``rows`` tokens of one slot in the last pass; None if not recorded."""
        return self.last_pass[slot, :rows] if self.is_watched and self.last_pass is not None else None


class Recorder:
    """A forward hook that records a module's output. Copies and unpickled instances do nothing."""

    only_watches = True

    def __init__(self, watcher: HiddenStates | None = None, layer: int | None = None) -> None:
        self._watcher = weakref.ref(watcher) if watcher else None  # the model may outlive its target
        self._layer = layer

    def __call__(self, module: torch.nn.Module, inputs: object, returned: object) -> None:
        if self._watcher and (watcher := self._watcher()):
            watcher.record(self._layer, returned)

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        return Recorder, ()


def only_watches(hook: object) -> bool:
    """Return True if a hook only records hidden states, whichever target it belongs to."""
    return bool(getattr(hook, "only_watches", False))


def hidden_in(returned: object) -> torch.Tensor | None:
    """Return the hidden states ``[batch, tokens, width]`` in a module's output, or None if there are none."""
    hidden = getattr(returned, "last_hidden_state", None)
    return hidden if isinstance(hidden, torch.Tensor) and hidden.dim() == 3 else None


def module_of_hidden(model: torch.nn.Module, kind: str, run: Callable[[], object]) -> torch.nn.Module:
    """Return the last module to return hidden states in the forward pass that ``run`` makes.

    Raise a ``FamilyError`` if there is no such module.
    """
    modules: list[torch.nn.Module] = []

    def record(module: torch.nn.Module, _: object, returned: object) -> None:
        if hidden_in(returned) is not None:
            modules.append(module)

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not modules:
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one does not return the hidden states that its output "
            "layer reads"
        )
    return modules[-1]
