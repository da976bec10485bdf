"""Hidden states of passes: finds the module that returns what the output layer reads, and watches it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hdtool.data.errors import FamilyError


class HiddenStates:
    """The input of a model's output layer in each pass, once it is watched, and beside it the output of some layers."""

    def __init__(self) -> None:
        self.is_watched = False
        self.of_pass: torch.Tensor | None = None
        """``[batch, tokens, columns]`` of the last pass."""
        self.layers: tuple[int, ...] = ()
        """Decoder layers whose outputs are the columns after those of the output layer's input."""
        self._of_layer: dict[int, torch.Tensor] = {}
        self._width = 0

    def watch(self, model: torch.nn.Module, kind: str, run: Callable[[], object]) -> None:
        """Watch a model from now on; ``run`` makes a forward pass of it, and ``kind`` names it in errors."""
        module_of_hidden(model, kind, run).register_forward_hook(Recorder(self))
        self.is_watched = True

    def watch_layers(self, decoder: torch.nn.Module, layers: Sequence[int]) -> None:
        """Watch the output of decoder layers, too, from now on."""
        own = getattr(decoder, "layers", ())
        if not layers or not all(0 <= layer < len(own) for layer in layers):
            raise FamilyError(f"layers {', '.join(map(str, layers))} are asked for, and this model has {len(own)}")
        for layer in dict.fromkeys(layers):
            if layer not in self.layers:
                own[layer].register_forward_hook(Recorder(self, layer))
        self.layers += tuple(layers)

    def columns(self, layers: Sequence[int] = ()) -> slice | None:
        """Where the outputs of these layers are in ``of_pass``, or the output layer's input; None if not watched."""
        if not self.is_watched:
            return None
        if not self._width:
            assert self.of_pass is not None
            self._width = self.of_pass.shape[-1] // (1 + len(self.layers))
        for first in range(len(self.layers) - len(layers) + 1):
            if not layers:
                return slice(0, self._width)
            if self.layers[first : first + len(layers)] == tuple(layers):
                return slice(self._width * (1 + first), self._width * (1 + first + len(layers)))
        return None

    def record(self, layer: int | None, returned: object) -> None:
        """Note what a layer of a pass returned, or the module that returns the output layer's input."""
        if layer is not None:
            found = returned[0] if isinstance(returned, tuple) else returned
            assert isinstance(found, torch.Tensor)
            self._of_layer[layer] = found
        elif (found := hidden_in(returned)) is not None:
            parts = [found, *(self._of_layer[layer] for layer in self.layers)]
            self.of_pass = torch.cat(parts, dim=-1) if len(parts) > 1 else found

    def rows_of(self, slot: int) -> torch.Tensor:
        """Those of one slot of the last pass, ``[tokens, width]``."""
        assert self.of_pass is not None
        return self.of_pass[slot]

    def of_slot(self, slot: int, rows: int) -> torch.Tensor | None:
        """The first rows of one slot of the last pass; None if they are not watched."""
        return self.rows_of(slot)[:rows] if self.is_watched else None


class Recorder:
    """A hook that records what a module returns. In copies of the model, and where it is loaded, it does nothing."""

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
    """Whether a hook changes nothing: one that watches hidden states, for this target or another one."""
    return bool(getattr(hook, "only_watches", False))


def hidden_in(returned: object) -> torch.Tensor | None:
    """The hidden states ``[batch, tokens, width]`` in the output of a module, if there are any."""
    found = getattr(returned, "last_hidden_state", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 3 else None


def module_of_hidden(model: torch.nn.Module, kind: str, run: Callable[[], object]) -> torch.nn.Module:
    """The last module that returns hidden states; ``run`` makes a forward pass of the model."""
    found: list[torch.nn.Module] = []

    def record(module: torch.nn.Module, _: object, returned: object) -> None:
        if hidden_in(returned) is not None:
            found.append(module)

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one does not return the hidden states that its output "
            "layer reads"
        )
    return found[-1]


def picked(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows; a device copies ranges of them, but would wait for a list of their numbers."""
    starts = [place for place, row in enumerate(rows) if place == 0 or row != rows[place - 1] + 1]
    ranges = zip(starts, [*starts[1:], len(rows)], strict=True)
    return torch.cat([hidden[rows[start] : rows[stop - 1] + 1] for start, stop in ranges])
