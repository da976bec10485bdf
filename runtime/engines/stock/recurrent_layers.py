"""Runs models with recurrent layers over draft trees.

Each row starts from the state after its parent. Mixers without a closed form run level by level, which requires no
knowledge of their recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module
from transformers.cache_utils import Cache

from hdtool.runtime.caches.states import StateLayer, StateName, States
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.stock.closed_forms import ClosedForm, ClosedStates, StackedStates
from hdtool.runtime.engines.stock.mixers import (
    DeviceIndices,
    Forward,
    HostIndices,
    Mixer,
    RowTree,
    forward_lock,
    has_own_forward,
    replace_forwards,
)

if TYPE_CHECKING:
    from hdtool.runtime.model.pass_inputs import StepTensors

LayerStates = dict[StateName, torch.Tensor]


class LevelStates:
    """The states of one layer after each row of a pass, grouped by tree level."""

    def __init__(self, tree: RowTree, before: LayerStates) -> None:
        self._tree = tree
        self._levels: list[LayerStates] = []
        self._before = before

    def start(self, parents: torch.Tensor) -> LayerStates:
        """Return copies of the states from which the next level's rows start; the mixer updates the copies in place.

        ``parents`` has the index of each row's parent in the previous level; in the first level, the index of its slot.
        """
        source = self._levels[-1] if self._levels else self._before
        self._levels.append({name: tensor.index_select(0, parents) for name, tensor in source.items()})
        return self._levels[-1]

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        last = rows[-1]
        place = self._tree.level_indices[slot, last]
        for name, tensor in self._levels[self._tree.depths[slot][last]].items():
            states.tensors[name][0].copy_(tensor[place])


def forward_by_levels(
    mixer: Mixer, forward: Forward, tree: RowTree, cache: Any, states: LevelStates, args: Any, kwargs: Any
) -> Any:
    """Call the mixer's ``forward`` once per tree level; return its result for all rows of the trees."""
    hidden = args[0] if args else kwargs["hidden_states"]
    slots, rows = hidden.shape[:2]
    arguments = {name: value for name, value in kwargs.items() if not name.endswith("mask")}
    results: list[Any] = []
    held = cache.layers[mixer.layer]
    is_deferred = mixer.output is not None and _is_plain(mixer.output)
    with _projected(mixer, hidden) as rows_now:
        try:
            for level in tree.levels:
                rows_now.append(level.rows)
                cache.layers[mixer.layer] = StateLayer(states.start(level.parents), has_begun=True)
                part = [_rows_of(value, level.rows, slots, rows) for value in (args, arguments)]
                results.append(forward(*part[0], **part[1]))
        finally:
            cache.layers[mixer.layer] = held
    first = [result[0] if isinstance(result, tuple) else result for result in results]
    whole = first[0].new_zeros((slots * rows, *first[0].shape[2:]))
    for level, level_output in zip(tree.levels, first, strict=True):
        whole[level.rows] = level_output[:, 0]
    whole = whole.view(slots, rows, *whole.shape[1:])
    if mixer.output and is_deferred:
        whole = mixer.output(whole)
    return (whole, *results[-1][1:]) if isinstance(results[-1], tuple) else whole


@contextmanager
def _projected(mixer: Mixer, hidden: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Apply input projections to all rows; in this block, the mixer uses the results and skips its output projection.

    The caller appends the rows of each level to the yielded list before it computes the level, and applies the output
    projection afterwards.
    """
    now: list[torch.Tensor] = []
    changes: list[tuple[Module, Forward]] = [
        (module, partial(_chosen, module(hidden).flatten(0, 1), now)) for module in mixer.inputs if _is_plain(module)
    ]
    if mixer.output and _is_plain(mixer.output):
        changes.append((mixer.output, lambda unchanged: unchanged))
    with replace_forwards(changes):
        yield now


def _is_plain(module: Module) -> bool:
    """Return True if calling a module only runs its class's ``forward``, without hooks.

    Hooks would run once for all rows and again for each level.
    """
    return not (has_own_forward(module) or module._forward_hooks or module._forward_pre_hooks)


def _chosen(whole: torch.Tensor, now: list[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    return whole[now[-1]][:, None]


def _rows_of(value: Any, chosen: torch.Tensor, slots: int, rows: int) -> Any:
    """Select rows from a mixer's arguments; each row becomes a sequence of one token."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == rows and value.shape[0] in (1, slots):
        whole = value.expand(slots, *value.shape[1:]).flatten(0, 1)
        return whole[chosen][:, None]
    if isinstance(value, tuple):
        return tuple(_rows_of(item, chosen, slots, rows) for item in value)
    if isinstance(value, dict):
        return {name: _rows_of(item, chosen, slots, rows) for name, item in value.items()}
    return value


class _LayerStates(Protocol):
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None: ...


class StatesOfPass:
    """The states of all layers after each row of a pass."""

    def __init__(self, layers: Sequence[_LayerStates]) -> None:
        self._layers = layers

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for layer in self._layers:
            layer.commit(slot, rows, states)


class RecurrentLayers:
    """Runs the mixers of a model in passes over trees."""

    def __init__(self, model: Module, mixers: Sequence[Mixer], device: torch.device) -> None:
        self._lock = forward_lock(model)
        self._mixers, self._device = mixers, device
        self._closed: dict[Mixer, ClosedForm] = {}

    def use_closed_forms(self) -> None:
        """From now on, use a closed form for each mixer that has one."""
        self._closed = {mixer: form for mixer in self._mixers if (form := ClosedForm.of(mixer))}

    def use_levels(self) -> None:
        """Run all mixers level by level from now on."""
        self._closed = {}

    @property
    def has_closed_forms(self) -> bool:
        return bool(self._closed)

    @property
    def can_be_captured(self) -> bool:
        """True if passes have fixed shapes, because all mixers compute in closed form."""
        return len(self._closed) == len(self._mixers)

    @contextmanager
    def over(self, trees: Sequence[DraftTree], states: States, cache: Cache) -> Iterator[StatesOfPass]:
        """In this block, make the model's passes run over trees, starting from ``states``, which stay unchanged.

        Yield the states after each row of the trees.
        """
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
        """In this block, make the model's passes run over the trees of ``step``; such passes can be captured.

        Yield a function that returns the states after the step's rows, to call after the pass.
        """
        states = states.part(0, step.tokens.shape[0])
        indices = DeviceIndices(step)
        layers = [ClosedStates(states.by_layer[mixer.layer], indices) for mixer in self._mixers]
        pairs = zip(self._mixers, layers, strict=True)
        with self._replaced([partial(_call, partial(self._closed[mixer], cache, cached)) for mixer, cached in pairs]):
            yield lambda: StackedStates(layers, states)

    @contextmanager
    def _replaced(self, forwards: Sequence[Forward]) -> Iterator[None]:
        """In this block, replace each mixer's ``forward`` and hold the model's lock."""
        modules = [mixer.module for mixer in self._mixers]
        with self._lock, replace_forwards(zip(modules, forwards, strict=True)):
            yield


def _call(forward: Callable[[tuple[Any, ...], dict[str, Any]], Any], *args: Any, **kwargs: Any) -> Any:
    return forward(args, kwargs)
