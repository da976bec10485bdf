"""Runs mixers for which hdtool has no description, by the code of transformers.

Observing a pass shows which modules update states. Over draft trees, these mixers run level by level, each row from the
state after its parent, which requires no knowledge of their recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import Module
from transformers.cache_utils import DynamicCache

from hdtool.runtime.caches.recurrent_states import StateLayer, StateName, States
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.reference.tree_indices import Rows, parent_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Forward = Callable[..., Any]
LayerStates = dict[StateName, torch.Tensor]


def has_own_forward(module: Module) -> bool:
    """Return True if an instance attribute ``forward`` replaces the class's method, as accelerate's hooks do."""
    return "forward" in vars(module)


@contextmanager
def replace_forwards(changes: Iterable[tuple[Module, Forward]]) -> Iterator[None]:
    """In this block, replace the ``forward`` of modules for the calling thread; other threads run the original."""
    held: list[tuple[Module, Forward | None]] = []
    try:
        for module, forward in changes:
            original = module.forward
            held.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _in_thread(get_ident(), forward, original)
        yield
    finally:
        for module, before in reversed(held):
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before


def _in_thread(owner: int, forward: Forward, original: Forward) -> Forward:
    return lambda *args, **kwargs: (forward if get_ident() == owner else original)(*args, **kwargs)


@dataclass(eq=False)
class Mixer:
    """A module that mixes the tokens of a sequence through a recurrent state or a short convolution."""

    layer: int
    """Index of the cache layer that holds the mixer's states."""
    module: Module
    inputs: list[Module] = field(default_factory=list)
    """Projections of the mixer's input, each called once."""
    output: Module | None = None
    """Projection whose output the mixer returns, if any."""


class AttentionInMixerError(Exception):
    """Raised if a mixer also updates keys and values, so that it can't run level by level."""


class _Watched(DynamicCache):
    """A cache that records which modules update it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[Module] = []
        self.state_updaters: dict[tuple[int, Module], None] = {}
        self.key_updaters: set[Module] = set()

    def _note(self, layer: int) -> None:
        if self.calls:  # otherwise the observed pass is over
            self.state_updaters[layer, self.calls[-1]] = None

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.key_updaters.update(self.calls)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


def find_mixers(model: PreTrainedModel, config: Any, run: Callable[[DynamicCache], object]) -> list[Mixer]:
    """Return the mixers of a model. ``run`` must make a pass over a few tokens with the cache it is given.

    Raise an ``AttentionInMixerError`` if a mixer also has attention.
    """
    cache, traces = _Watched(config), dict[Module, _Trace]()
    with _watching(model, cache.calls, traces):
        run(cache)
    updaters = dict(cache.state_updaters)
    # If mixers are nested, the outermost runs level by level.
    inner = {part for _, module in updaters for part in module.modules() if part is not module}
    mixers = []
    for layer, module in updaters:
        if module in inner:
            continue
        if module in cache.key_updaters:
            raise AttentionInMixerError(f"{type(module).__name__} attends beside its recurrence")
        mixers.append(Mixer(layer, module, *traces[module].projections()))
    return mixers


@dataclass
class _Trace:
    """Input and output of a module, and of the linear layers called in it."""

    given: torch.Tensor | None = None
    returned: torch.Tensor | None = None
    linear: list[tuple[Module, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def projections(self) -> tuple[list[Module], Module | None]:
        called = [module for module, _, _ in self.linear]
        once = [call for call in self.linear if called.count(call[0]) == 1]
        inputs = [module for module, read, _ in once if read is self.given]
        output = next((module for module, _, gave in once if gave is self.returned and module not in inputs), None)
        return inputs, output


@contextmanager
def _watching(model: Module, calls: list[Module], traces: dict[Module, _Trace]) -> Iterator[None]:
    """In this block, keep this thread's stack of module calls in ``calls``, and each module's trace in ``traces``."""
    thread = get_ident()

    def enter(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:
            return
        calls.append(module)
        hidden = args[0] if args else kwargs.get("hidden_states")
        traces[module] = _Trace(hidden if isinstance(hidden, torch.Tensor) else None)

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
    """Return True if a module is a linear layer, which computes each input row independently."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


class Level(NamedTuple):
    """The rows at one depth of the trees, for all slots."""

    rows: torch.Tensor
    """Indices of the level's rows among the padded rows of all slots."""
    parents: torch.Tensor
    """Index of each row's parent in the level above; in the first level, index of the row's slot."""


class TreeLevels:
    """The trees of a pass, one per slot, divided into levels; all are padded to the rows of the largest tree."""

    def __init__(self, trees: Sequence[DraftTree], device: torch.device) -> None:
        self._trees, self._device = trees, device
        self._rows = max(map(len, trees)) + 1

    @cached_property
    def depths(self) -> list[Rows]:
        """Depth of each row, by slot."""
        return [np.asarray(tree.depths, np.int64) for tree in self._trees]

    @cached_property
    def levels(self) -> list[Level]:
        levels, parent_rows_of = [], list(map(parent_rows, self._trees))
        for depth in range(int(max(slot_depths.max() for slot_depths in self.depths)) + 1):
            rows, level_parents = [], []
            for slot, (parents, depths) in enumerate(zip(parent_rows_of, self.depths, strict=True)):
                at = np.flatnonzero(depths == depth)
                rows.append(at + slot * self._rows)
                level_parents.append(self.level_indices[slot, parents[at]] if depth else np.full(len(at), slot))
            levels.append(Level(self._sent(np.concatenate(rows)), self._sent(np.concatenate(level_parents))))
        return levels

    @cached_property
    def level_indices(self) -> Rows:
        """Index of each row in its level, shape ``[slots, rows]``."""
        places = np.zeros((len(self._trees), self._rows), np.int64)
        counts: dict[int, int] = {}
        for slot, depths in enumerate(self.depths):
            for row, depth in enumerate(depths.tolist()):
                places[slot, row] = counts.get(depth, 0)
                counts[depth] = counts.get(depth, 0) + 1
        return places

    def _sent(self, numbers: Rows) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)


class LevelStates:
    """The states of one layer after each row of a pass, grouped by tree level."""

    def __init__(self, tree: TreeLevels, before: LayerStates) -> None:
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
    mixer: Mixer, forward: Forward, tree: TreeLevels, cache: Any, states: LevelStates, /, *args: Any, **kwargs: Any
) -> Any:
    """Call the mixer's ``forward`` once per tree level, without masks; return the result for all rows of the trees."""
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
