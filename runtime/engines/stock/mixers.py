"""Observes a pass to find the modules that update recurrent states, and computes index tensors that describe trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Module
from transformers.cache_utils import DynamicCache

from hdtool.runtime.core.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.model.pass_inputs import StepTensors

Rows = npt.NDArray[np.int64]


class Level(NamedTuple):
    """The rows at one depth of the trees, for all slots."""

    rows: torch.Tensor
    """Indices of the level's rows among the padded rows of all slots."""
    parents: torch.Tensor
    """Index of each row's parent in the level above; in the first level, index of the row's slot."""


class RowTree:
    """The trees of a pass, one per slot, each padded to the number of rows of the largest tree."""

    def __init__(self, trees: Sequence[DraftTree], device: torch.device) -> None:
        self.slots, self.rows = len(trees), max(map(len, trees)) + 1
        self._device = device
        self.parents: list[Rows] = [np.concatenate([[-1], tree.parents + 1]).astype(np.int64) for tree in trees]
        """Parent row of each row, for each slot; -1 for the root."""
        self.depths: list[Rows] = [np.asarray(tree.depths, np.int64) for tree in trees]

    @cached_property
    def levels(self) -> list[Level]:
        levels = []
        for depth in range(int(max(slot_depths.max() for slot_depths in self.depths)) + 1):
            rows, level_parents = [], []
            for slot, (parents, depths) in enumerate(zip(self.parents, self.depths, strict=True)):
                at = np.flatnonzero(depths == depth)
                rows.append(at + slot * self.rows)
                level_parents.append(self.level_indices[slot, parents[at]] if depth else np.full(len(at), slot))
            levels.append(Level(self._sent(np.concatenate(rows)), self._sent(np.concatenate(level_parents))))
        return levels

    @cached_property
    def level_indices(self) -> Rows:
        """Index of each row in its level, shape ``[slots, rows]``."""
        places = np.zeros((self.slots, self.rows), np.int64)
        counts: dict[int, int] = {}
        for slot, depths in enumerate(self.depths):
            for row, depth in enumerate(depths.tolist()):
                places[slot, row] = counts.get(depth, 0)
                counts[depth] = counts.get(depth, 0) + 1
        return places

    def _sent(self, numbers: Rows) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)


class TreeIndices:
    """Index tensors on the model's device that describe the trees of a pass, for use by closed forms."""

    rows: int

    def __init__(self) -> None:
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """True at ``[slot, i, j]`` if row ``j`` is row ``i`` or its ancestor. Shape ``[slots, rows, rows]``."""
        raise NotImplementedError

    @cached_property
    def sums(self) -> torch.Tensor:
        """``ancestors`` as floats, so that a matmul sums over each row's path."""
        return self.ancestors.float()

    @cached_property
    def hidden(self) -> torch.Tensor:
        """``ancestors`` negated, shape ``[slots, 1, rows, rows]``."""
        return ~self.ancestors[:, None]

    def window(self, before: int, size: int) -> torch.Tensor:
        """Return the indices of the ``size`` columns that a convolution reads for each row, ``[slots, rows, size]``.

        The first ``before`` columns are the state's, followed by one column per row.
        """
        if (before, size) not in self._windows:
            self._windows[before, size] = self._window(before, size)
        return self._windows[before, size]

    def _window(self, before: int, size: int) -> torch.Tensor:
        raise NotImplementedError


class HostIndices(TreeIndices):
    """Index tensors computed on the host, from the trees of a pass."""

    def __init__(self, tree: RowTree, device: torch.device) -> None:
        super().__init__()
        self.rows, self._tree, self._device = tree.rows, tree, device

    @cached_property
    def ancestors(self) -> torch.Tensor:
        tree = self._tree
        read = np.zeros((tree.slots, tree.rows, tree.rows), np.bool_)
        for slot, parents in enumerate(tree.parents):
            for row, parent in enumerate(parents.tolist()):
                if parent >= 0:
                    read[slot, row] = read[slot, parent]
                read[slot, row, row] = True
        return torch.from_numpy(read).to(self._device)

    def _window(self, before: int, size: int) -> torch.Tensor:
        tree = self._tree
        columns = np.full((tree.slots, tree.rows, size), before, np.int64)
        for slot, parents in enumerate(tree.parents):
            for row, parent in enumerate(parents.tolist()):
                parent_columns = columns[slot, parent] if parent >= 0 else np.arange(before - size, before)
                columns[slot, row] = [*parent_columns[1:], before + row]
        return torch.from_numpy(columns).to(self._device)


class DeviceIndices(TreeIndices):
    """Index tensors of a captured step, computed on the device. Padding rows read only the root."""

    def __init__(self, step: StepTensors) -> None:
        super().__init__()
        self._step = step
        self.rows = step.tokens.shape[1]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        bits = self._step.ancestor_mask
        nodes = torch.arange(self.rows - 1, device=bits.device)
        read = (bits[..., None] >> nodes) & 1 == 1
        root = torch.ones_like(bits[..., None], dtype=torch.bool)
        return torch.cat([root, read], -1)

    def _window(self, before: int, size: int) -> torch.Tensor:
        depth = self._step.positions - self._step.length[:, None]
        back = torch.arange(size - 1, -1, -1, device=depth.device)
        wanted = depth[..., None] - back
        is_there = self.ancestors[:, :, None] & (depth[:, None, None] == wanted[..., None])
        return torch.where(wanted >= 0, before + is_there.int().argmax(-1), before + wanted)


Forward = Callable[..., Any]

_LOCKS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


def forward_lock(model: Module) -> Any:
    """Return the lock to hold while replacing or inspecting a model's ``forward`` methods, shared by its targets."""
    return _LOCKS.setdefault(model, RLock())


def has_own_forward(module: Module) -> bool:
    """Return True if an instance attribute ``forward`` replaces the class's method, as accelerate's hooks do."""
    return "forward" in vars(module)


@contextmanager
def replace_forwards(changes: Iterable[tuple[Module, Forward]]) -> Iterator[None]:
    """In this block, replace the ``forward`` of modules, for this thread only."""
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
