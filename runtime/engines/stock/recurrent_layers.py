"""Runs models with recurrent layers over draft trees: described mixers in closed form, others level by level.

Each row starts from the state after its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from transformers.cache_utils import Cache

from hdtool.runtime.caches.recurrent_states import CONV, RECURRENT, StateName, States, StateShape, StatesOfTree
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.reference.mixers import REFERENCE, mix
from hdtool.runtime.engines.reference.tree_indices import TreeIndices
from hdtool.runtime.engines.reference.tree_recurrences import MixerStates, StackedStates
from hdtool.runtime.engines.stock.forward_lock import forward_lock
from hdtool.runtime.engines.stock.undescribed_mixers import (
    Forward,
    LevelStates,
    Mixer,
    TreeLevels,
    forward_by_levels,
    is_linear,
    replace_forwards,
)
from hdtool.runtime.model.pass_inputs import StepTensors, sent_step
from hdtool.runtime.program.llama_like_families import package_of
from hdtool.runtime.program.mixer_parts import SHORT_CONVOLUTION, UNLIMITED, MixerParts, mixer_parts
from hdtool.runtime.program.model_parts import EngineSupport

ANY: EngineSupport[Module] = EngineSupport(is_linear, lambda weight: True, lambda module: True, divisor=1)
"""Support for modules of any kind, because they run by their own code."""


def described_mixers(model: Module, shapes: Iterable[StateShape]) -> dict[int, MixerParts[Module]]:
    """Return the parts of described mixers by layer, for each layer whose states belong to a single such mixer."""
    states: dict[int, set[StateName]] = {}
    for shape in shapes:
        states.setdefault(shape.name.layer, set()).add(shape.name)
    found: dict[int, list[MixerParts[Module]]] = {}
    for module in filter(package_of, model.modules()):
        layer = getattr(module, "layer_idx", None)
        if layer in states and (parts := mixer_parts(module, layer, ANY)) and states[layer] == _states_of(parts):
            found.setdefault(layer, []).append(parts)
    return {layer: parts for layer, (parts, *others) in found.items() if not others}


def _states_of(parts: MixerParts[Module]) -> set[StateName]:
    kinds = (CONV,) if parts.kind == SHORT_CONVOLUTION else (CONV, RECURRENT)
    return {StateName(parts.layer, kind, 0) for kind in kinds}


class StatesOfPass:
    """Advances the states of all recurrent layers along the accepted paths of a pass's trees."""

    def __init__(self, layers: Sequence[StatesOfTree]) -> None:
        self._layers = layers

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for layer in self._layers:
            layer.commit(slot, rows, states)


class RecurrentLayers:
    """Runs the mixers of a model in passes over trees."""

    def __init__(
        self, model: Module, device: torch.device, described: Mapping[int, MixerParts[Module]], others: Sequence[Mixer]
    ) -> None:
        self._lock, self._device = forward_lock(model), device
        self._described, self._others = described, others

    @property
    def can_be_captured(self) -> bool:
        """True if passes have fixed shapes, because all mixers compute in closed form."""
        return not self._others

    @property
    def bounds_prompts(self) -> bool:
        """True if transformers bounds time steps of some mixer while it reads a prompt, and not while it decodes."""
        return any(parts.step_limit != UNLIMITED for parts in self._described.values())

    @contextmanager
    def over(
        self, trees: Sequence[DraftTree], states: States, cache: Cache, step: StepTensors | None = None
    ) -> Iterator[StatesOfPass]:
        """In this block, make the model's passes run over trees, starting from ``states``, which stay unchanged.

        Yield what advances the states after the pass. ``step`` holds the trees, if they have been sent to the device.
        """
        states = states.part(0, len(trees))
        step = step or sent_step(trees, [0] * len(trees), self._device)
        closed, levels = self._closed(step, states), TreeLevels(trees, self._device)
        by_level = [(mixer, LevelStates(levels, states.by_layer[mixer.layer])) for mixer in self._others]
        forwards = [
            (mixer.module, partial(forward_by_levels, mixer, mixer.module.forward, levels, cache, after))
            for mixer, after in by_level
        ]
        with self._replaced(closed, forwards):
            yield StatesOfPass([*closed.values(), *(after for _, after in by_level)])

    @contextmanager
    def over_step(self, step: StepTensors, states: States) -> Iterator[Callable[[], StackedStates]]:
        """In this block, make the model's passes run over the trees of ``step``; such passes can be captured.

        Yield a function to call after the pass, which returns what advances the states.
        """
        states = states.part(0, step.tokens.shape[0])
        closed = self._closed(step, states)
        with self._replaced(closed):
            yield lambda: StackedStates(list(closed.values()), states, REFERENCE.write)

    def _closed(self, step: StepTensors, states: States) -> dict[int, MixerStates]:
        """Return the states of the described mixers before a pass over the trees of ``step``, by layer."""
        indices = TreeIndices(step)
        return {layer: MixerStates(states.by_layer[layer], indices) for layer in self._described}

    @contextmanager
    def _replaced(
        self, closed: dict[int, MixerStates], others: Sequence[tuple[Module, Forward]] = ()
    ) -> Iterator[None]:
        """In this block, replace each mixer's ``forward`` and hold the model's lock."""
        described = [(self._described[layer], states) for layer, states in closed.items()]
        forwards = [(parts.module, partial(_mix, parts, states)) for parts, states in described]
        with self._lock, replace_forwards([*forwards, *others]):
            yield


def _mix(parts: MixerParts[Module], states: MixerStates, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a described mixer in place of its module's ``forward``, with the same arguments."""
    return mix(parts, args[0] if args else kwargs["hidden_states"], states)
