"""Finds the modules of a model that update the states of recurrent layers, by watching a pass of its own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from transformers.cache_utils import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False)
class Mixer:
    """A module that mixes the tokens of a sequence by a state."""

    layer: int
    """The layer of the cache that holds its states."""
    module: Module
    inputs: list[Module] = field(default_factory=list)
    """Its projections of the hidden states that it gets, and nothing else."""
    output: Module | None = None
    """Its projection whose result it returns."""


class AttentionInMixerError(Exception):
    """A module updates keys and values beside its state, so it cannot be called for one level of a tree alone."""


class _Watched(DynamicCache):
    """A cache that notes which modules update it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[Module] = []
        self.of_states: dict[tuple[int, Module], None] = {}
        self.of_keys: set[Module] = set()

    def _note(self, layer: int) -> None:
        if self.calls:  # else the pass that was watched is over
            self.of_states[layer, self.calls[-1]] = None

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.of_keys.update(self.calls)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


def find_mixers(model: PreTrainedModel, config: Any, run: Callable[[DynamicCache], object]) -> list[Mixer]:
    """The mixers of a model; ``run`` makes a pass of a few tokens with a cache.

    AttentionInMixerError is raised where one of them attends, too.
    """
    cache, traces = _Watched(config), dict[Module, _Trace]()
    with _watching(model, cache.calls, traces):
        run(cache)
    found = dict(cache.of_states)
    # Of modules inside each other, the outer one is called for each level.
    inner = {part for _, module in found for part in module.modules() if part is not module}
    mixers = []
    for layer, module in found:
        if module in inner:
            continue
        if module in cache.of_keys:
            raise AttentionInMixerError(f"{type(module).__name__} attends beside its recurrence")
        mixers.append(Mixer(layer, module, *traces[module].projections()))
    return mixers


@dataclass
class _Trace:
    """The linear layers that were called in a module, with what they read and gave."""

    given: torch.Tensor | None = None
    returned: torch.Tensor | None = None
    linear: list[tuple[Module, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def projections(self) -> tuple[list[Module], Module | None]:
        called = [module for module, _, _ in self.linear]
        once = [one for one in self.linear if called.count(one[0]) == 1]
        inputs = [module for module, read, _ in once if read is self.given]
        output = next((module for module, _, gave in once if gave is self.returned and module not in inputs), None)
        return inputs, output


@contextmanager
def _watching(model: Module, calls: list[Module], traces: dict[Module, _Trace]) -> Iterator[None]:
    """Note in this block which modules are being called by this thread, the innermost last."""
    thread = get_ident()

    def enter(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:
            return
        calls.append(module)
        given = args[0] if args else kwargs.get("hidden_states")
        traces[module] = _Trace(given if isinstance(given, torch.Tensor) else None)

    def leave(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        if get_ident() != thread:
            return
        calls.pop()
        first = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(first, torch.Tensor):
            traces[module].returned = first
            if is_linear(module) and args and calls:
                traces[calls[-1]].linear.append((module, args[0], first))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_linear(module: Module) -> bool:
    """Whether a module computes each row of its input alone, as a matrix product."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")
