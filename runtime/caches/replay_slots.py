"""Slots for any kind of ``transformers`` cache; each pass runs on a copy of the cache.

Keys and values grow by concatenation into new tensors, so the copy can share the old tensors. States are updated in
place, so they are cloned.

These caches cannot drop their last tokens. After a rejected draft, a slot therefore keeps the cache from before the
pass, and the next pass reads the accepted tokens again first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig

from hdtool.runtime.caches.kv_cache import KVTensors, StaticKVCache
from hdtool.runtime.caches.recurrent_states import KeptStates, Snapshot, kept, up_to
from hdtool.runtime.caches.slots import Cache, Slot

TensorPath = tuple[Any, ...]
"""Path to a tensor in a cache: attribute names, keys and indices, outermost first."""
WHOLE = torch.nn.Module, PreTrainedConfig, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device
"""Types that are neither copied nor searched for tensors."""


def copied(cache: Any, shared: Collection[TensorPath]) -> Any:
    """Return a copy of a cache for a pass to change.

    Tensors at the paths ``shared`` are not cloned, because passes replace them instead of changing them in place.
    """
    return _rebuilt(cache, lambda path, tensor: tensor if path in shared else tensor.clone())


def tensors_of(cache: Any) -> dict[TensorPath, torch.Tensor]:
    """Return all tensors in a cache, by path."""
    tensors: dict[TensorPath, torch.Tensor] = {}

    def note(path: TensorPath, tensor: torch.Tensor) -> torch.Tensor:
        tensors[path] = tensor
        return tensor

    _rebuilt(cache, note)
    return tensors


def with_views_of(longer: Any, cache: Any, shared: Collection[TensorPath]) -> Any:
    """Return a copy of ``cache`` with tensors replaced by views into ``longer``, a later cache of the same sequence.

    Only tensors at the paths ``shared`` are replaced, and only if the tensor at the same path in ``longer`` begins with
    the same values.
    """
    others = tensors_of(longer)

    def view(path: TensorPath, tensor: torch.Tensor) -> torch.Tensor:
        extended = others.get(path) if path in shared else None
        return tensor if extended is None else _as_part(extended, tensor)

    return _rebuilt(cache, view)


def bytes_of(caches: Iterable[Any]) -> int:
    """Return the total memory of the caches in bytes, counting shared memory once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for tensor in tensors_of(cache).values()
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


class Replaced:
    """Finds the paths of the tensors that every pass replaces without changing them in place.

    Passes must not run in inference mode, in which tensors have no version counters.
    """

    def __init__(self) -> None:
        self._always: set[TensorPath] = set()
        self._other: set[TensorPath] = set()

    @property
    def paths(self) -> frozenset[TensorPath]:
        return frozenset(self._always - self._other)

    def watch(self, cache: Callable[[], Any], run: Callable[[], object]) -> None:
        """Run a pass and record which tensors it replaces; ``cache`` is called before and after to get the cache."""
        before = {path: (tensor, tensor._version) for path, tensor in tensors_of(cache()).items()}
        run()
        after = tensors_of(cache())
        for path, (tensor, version) in before.items():
            is_replaced = after.get(path) is not tensor and tensor._version == version
            (self._always if is_replaced else self._other).add(path)


def _as_part(longer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``longer`` that equals ``tensor`` if ``longer`` begins with it, otherwise ``tensor`` itself."""
    if longer.dim() != tensor.dim() or longer.dtype != tensor.dtype or longer.device != tensor.device:
        return tensor
    differ = [dim for dim, (long, short) in enumerate(zip(longer.shape, tensor.shape, strict=True)) if long != short]
    if len(differ) > 1 or any(longer.shape[dim] < tensor.shape[dim] for dim in differ):
        return tensor
    part = longer.narrow(differ[0], 0, tensor.shape[differ[0]]) if differ else longer
    return part if torch.equal(part, tensor) else tensor


def _rebuilt(cache: Any, of_tensor: Callable[[TensorPath, torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a cache with each tensor replaced by what ``of_tensor`` returns for it."""
    copies: dict[int, Any] = {}

    def rebuilt(value: Any, path: TensorPath) -> Any:
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, torch.Tensor):
            copies[id(value)] = of_tensor(path, value)
        elif isinstance(value, list | tuple):
            parts = [rebuilt(part, (*path, number)) for number, part in enumerate(value)]
            copies[id(value)] = parts if isinstance(value, list) else tuple(parts)
        elif isinstance(value, dict):
            new = copies[id(value)] = copy.copy(value)
            for key, part in value.items():
                new[key] = rebuilt(part, (*path, key))
        elif hasattr(value, "__dict__") and not isinstance(value, WHOLE):
            new = copies[id(value)] = copy.copy(value)
            for name, part in vars(value).items():
                vars(new)[name] = rebuilt(part, (*path, name))
        else:
            return value
        return copies[id(value)]

    return rebuilt(cache, ())


NOTHING_READ = Snapshot(0, None)


class ReplayedCaches(KeptStates):
    """``transformers`` caches after some prefixes of a sequence, from each of which a pass can continue."""

    keeps_states = True

    def __init__(self, shared: Collection[TensorPath]) -> None:
        """``shared`` holds the paths of tensors that passes replace and never change in place."""
        self._shared = shared
        self.filled = NOTHING_READ
        """Cache from which the next pass continues."""
        self.older: list[Snapshot] = []
        """Caches that ``keep`` has kept, from which another prompt may continue, the shortest first."""
        self._after = NOTHING_READ
        """Cache after the last pass, until it is known whether all its tokens are accepted."""

    @property
    def bytes(self) -> int:
        return bytes_of(filled.states for filled in (self.filled, *self.older))

    @property
    def has_begun(self) -> bool:
        return self.filled.length > 0

    def resumes_at(self, shared: int) -> int:
        return max((filled.length for filled in (self.filled, *self.older) if filled.length <= shared), default=0)

    def keep(self) -> None:
        before = [
            Snapshot(older.length, with_views_of(self.filled.states, older.states, self._shared))
            for older in self.older
            if 0 < older.length < self.filled.length
        ]
        self.older = kept(before, self.filled)

    def copy_of_filled(self) -> Any:
        """Return a copy of the cache in ``filled`` for a pass over further tokens; None if nothing has been read."""
        return copied(self.filled.states, self._shared)

    def cut(self, length: int) -> None:
        self.copy_from(self, length)

    def end_reading(self, length: int) -> None:
        if self._after.length == length:
            self.filled = self._after
        self._after = NOTHING_READ

    def hold(self, states: Snapshot, place: int) -> None:
        self._after = states

    def commit(self, rows: Sequence[int], length: int) -> None:
        self.end_reading(length)

    def copy_from(self, source: ReplayedCaches, length: int) -> None:
        """Take over those caches of ``source`` that have at most ``length`` tokens, and continue from the longest."""
        self._after = NOTHING_READ
        candidates = up_to([*source.older, source.filled], length)
        self.older = up_to(source.older, length)
        self.filled = max(candidates, key=lambda filled: filled.length, default=NOTHING_READ)


class ReplayCache(Cache):
    """Slots for caches that ``transformers`` allocates."""

    def __init__(self, shared: Collection[TensorPath], slots: int = 1) -> None:
        self._shared = shared
        super().__init__((), slots)

    def _slot_of(self, storage: KVTensors) -> Slot:
        return Slot(StaticKVCache(storage), ReplayedCaches(self._shared))
