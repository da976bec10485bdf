"""Passes over trees of a model with recurrent layers: its mixers start each row from the state after its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module
from transformers.cache_utils import Cache

from hdtool.runtime.model.cache.states import States
from hdtool.runtime.model.recurrent.by_levels import LevelStates, forward_by_levels
from hdtool.runtime.model.recurrent.in_closed_form import ClosedForm, ClosedStates, StackedStates
from hdtool.runtime.model.recurrent.mixers import Mixer
from hdtool.runtime.model.recurrent.other_forwards import Forward, lock_of, other_forwards
from hdtool.runtime.model.recurrent.row_tree import RowTree
from hdtool.runtime.model.recurrent.tree_indices import DeviceIndices, HostIndices
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.step_input import StepTensors


class _LayerStates(Protocol):
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None: ...


class StatesOfPass:
    """The states after each row of a pass, of all layers."""

    def __init__(self, layers: Sequence[_LayerStates]) -> None:
        self._layers = layers

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for layer in self._layers:
            layer.commit(slot, rows, states)


class RecurrentLayers:
    """The mixers of a model."""

    def __init__(self, model: Module, mixers: Sequence[Mixer], device: torch.device) -> None:
        self._lock = lock_of(model)
        self._mixers, self._device = mixers, device
        self._closed: dict[Mixer, ClosedForm] = {}

    def use_closed_forms(self) -> None:
        """Compute rows in closed form from now on, where a mixer has one."""
        self._closed = {mixer: form for mixer in self._mixers if (form := ClosedForm.of(mixer))}

    def use_levels(self) -> None:
        """Compute all mixers by levels from now on."""
        self._closed = {}

    @property
    def has_closed_forms(self) -> bool:
        return bool(self._closed)

    @property
    def can_be_captured(self) -> bool:
        """Whether passes have fixed shapes: all mixers compute in closed form."""
        return len(self._closed) == len(self._mixers)

    @contextmanager
    def over(self, trees: Sequence[DraftTree], states: States, cache: Cache) -> Iterator[StatesOfPass]:
        """In this block a pass of the model is one over trees, from the ``states`` before them, which it leaves."""
        tree, states = RowTree(trees, self._device), states.part(0, len(trees))
        indices = HostIndices(tree, self._device)
        layers: list[_LayerStates] = []
        forwards: list[Forward] = []
        for mixer in self._mixers:
            before = states.by_layer[mixer.layer]
            if form := self._closed.get(mixer):
                written = ClosedStates(before, indices)
                layers.append(written)
                forwards.append(partial(_call, partial(form, cache, written)))
            else:
                after = LevelStates(tree, before)
                layers.append(after)
                forward = partial(forward_by_levels, mixer, mixer.module.forward, tree, cache, after)
                forwards.append(partial(_call, forward))
        with self._replaced(forwards):
            yield StatesOfPass(layers)

    @contextmanager
    def over_step(self, step: StepTensors, states: States, cache: Cache) -> Iterator[Callable[[], StackedStates]]:
        """In this block a pass is a captured step; the function gives the states after its rows."""
        states = states.part(0, step.tokens.shape[0])
        indices = DeviceIndices(step)
        layers = [ClosedStates(states.by_layer[mixer.layer], indices) for mixer in self._mixers]
        pairs = zip(self._mixers, layers, strict=True)
        with self._replaced([partial(_call, partial(self._closed[mixer], cache, found)) for mixer, found in pairs]):
            yield lambda: StackedStates(layers, states)

    @contextmanager
    def _replaced(self, forwards: Sequence[Forward]) -> Iterator[None]:
        """In this block each mixer has another forward."""
        modules = [mixer.module for mixer in self._mixers]
        with self._lock, other_forwards(zip(modules, forwards, strict=True)):
            yield


def _call(forward: Callable[[tuple[Any, ...], dict[str, Any]], Any], *args: Any, **kwargs: Any) -> Any:
    return forward(args, kwargs)
