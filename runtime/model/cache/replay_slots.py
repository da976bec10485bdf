"""Slots that hold caches of ``transformers`` of any kind, which are never changed: each pass is made on a copy.

Keys and values grow by concatenation, which makes new tensors, so a copy need only refer to the old ones. States are
updated in place.

A cache cannot lose its last tokens. After a rejected draft a slot keeps the cache from before the pass, and the
accepted tokens wait: they are read again at the head of the next pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from hdtool.runtime.model.cache.kv_cache import KVTensors, StaticKVCache
from hdtool.runtime.model.cache.slots import Cache, Slot
from hdtool.runtime.model.cache.states import MOST_SNAPSHOTS

Place = tuple[Any, ...]
"""Where a tensor is in a cache: attributes, keys and indices from the outside in."""
WHOLE = torch.nn.Module, PreTrainedConfig, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device
"""What is not looked into."""


def copied(cache: Any, shared: Collection[Place]) -> Any:
    """A copy for a pass that must leave the cache unchanged; passes replace the tensors at ``shared``."""
    return _rebuilt(cache, lambda place, tensor: tensor if place in shared else tensor.clone())


def tensors_of(cache: Any) -> dict[Place, torch.Tensor]:
    """All tensors of a cache."""
    tensors: dict[Place, torch.Tensor] = {}

    def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        tensors[place] = tensor
        return tensor

    _rebuilt(cache, note)
    return tensors


def with_views_of(longer: Any, cache: Any, shared: Collection[Place]) -> Any:
    """A copy of a cache that shares memory with a longer cache it is a prefix of."""
    others = tensors_of(longer)

    def view(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        extended = others.get(place) if place in shared else None
        return tensor if extended is None else _as_part(extended, tensor)

    return _rebuilt(cache, view)


def bytes_of(caches: Iterable[Any]) -> int:
    """The memory of some caches, that which they share once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for tensor in tensors_of(cache).values()
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


class Replaced:
    """Finds the places whose tensors each pass replaces and leaves as they were; passes must not be in inference mode.

    Tensors that a pass does not reach, or that it replaces in some passes only, are not among them.
    """

    def __init__(self) -> None:
        self._always: set[Place] = set()
        self._other: set[Place] = set()

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(self._always - self._other)

    def watch(self, cache: Callable[[], Any], run: Callable[[], object]) -> None:
        """Watch a pass that updates a cache, or gives another one."""
        before = {place: (tensor, tensor._version) for place, tensor in tensors_of(cache()).items()}
        run()
        after = tensors_of(cache())
        for place, (tensor, version) in before.items():
            is_replaced = after.get(place) is not tensor and tensor._version == version
            (self._always if is_replaced else self._other).add(place)


def _as_part(longer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a view of one that begins with it along one dimension; the tensor itself if none does."""
    if longer.dim() != tensor.dim() or longer.dtype != tensor.dtype or longer.device != tensor.device:
        return tensor
    differ = [dim for dim, (long, short) in enumerate(zip(longer.shape, tensor.shape, strict=True)) if long != short]
    if len(differ) > 1 or any(longer.shape[dim] < tensor.shape[dim] for dim in differ):
        return tensor
    part = longer.narrow(differ[0], 0, tensor.shape[differ[0]]) if differ else longer
    return part if torch.equal(part, tensor) else tensor


def _rebuilt(cache: Any, of_tensor: Callable[[Place, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a cache whose tensors a function gives."""
    copies: dict[int, Any] = {}

    def rebuilt(value: Any, place: Place) -> Any:
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, torch.Tensor):
            copies[id(value)] = of_tensor(place, value)
        elif isinstance(value, list | tuple):
            parts = [rebuilt(part, (*place, number)) for number, part in enumerate(value)]
            copies[id(value)] = parts if isinstance(value, list) else tuple(parts)
        elif isinstance(value, dict):
            new = copies[id(value)] = copy.copy(value)
            for key, part in value.items():
                new[key] = rebuilt(part, (*place, key))
        elif hasattr(value, "__dict__") and not isinstance(value, WHOLE):
            new = copies[id(value)] = copy.copy(value)
            for name, part in vars(value).items():
                vars(new)[name] = rebuilt(part, (*place, name))
        else:
            return value
        return copies[id(value)]

    return rebuilt(cache, ())


class Filled(NamedTuple):
    """A cache of the library after the first tokens of a sequence."""

    length: int = 0
    cache: Any = None


NOTHING_READ = Filled()


class ReplaySlot(Slot):
    """One sequence, and the caches after some of its beginnings."""

    def __init__(self, shared: Collection[Place]) -> None:
        """Passes replace the tensors of a cache at ``shared``, and may change others in place."""
        super().__init__(StaticKVCache(KVTensors([], [], 0)))
        self._shared = shared
        self.filled = NOTHING_READ
        """The cache that the next pass goes on from."""
        self.older: list[Filled] = []
        """Caches after fewer tokens, from which another prompt may continue."""
        self._after = NOTHING_READ
        """What the pass over a chain left, of which nothing is accepted yet."""

    @property
    def bytes(self) -> int:
        return bytes_of(filled.cache for filled in (self.filled, *self.older))

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def valid(self) -> int:
        return len(self.tokens)

    @property
    def waiting(self) -> list[int]:
        """Accepted tokens that the next pass reads first."""
        return self.tokens[self.filled.length :]

    def resumes_at(self, shared: int) -> int:
        return max((filled.length for filled in (self.filled, *self.older) if filled.length <= shared), default=0)

    def keep_states(self) -> None:
        before = [filled for filled in self.older if 0 < filled.length < self.filled.length]
        shortened = [
            Filled(filled.length, with_views_of(self.filled.cache, filled.cache, self._shared)) for filled in before
        ]
        self.older = [*shortened, self.filled][-MOST_SNAPSHOTS:]

    def copy_of_filled(self) -> Any:
        """The cache for a pass over further tokens; None at first, as models make theirs."""
        return copied(self.filled.cache, self._shared)

    def cut(self, length: int) -> None:
        self._go_back(self, length)
        del self.tokens[length:]
        if self.hidden:
            self.hidden = [torch.cat(self.hidden)[:length]] if length else []
        self.tree = None

    def _go_back(self, source: ReplaySlot, length: int) -> None:
        """Take over a slot's longest cache of at most ``length`` tokens."""
        candidates = [filled for filled in (*source.older, source.filled) if filled.length <= length]
        self.older = [filled for filled in source.older if filled.length <= length]
        self.filled = max(candidates, key=lambda filled: filled.length, default=NOTHING_READ)

    def read(self, tokens: Sequence[int], cache: Any, hidden: torch.Tensor | None) -> None:
        """Accept tokens that a pass appended."""
        if hidden is not None:
            self.hidden.append(hidden)
        self.tokens += tokens
        self.filled = Filled(len(self.tokens), cache)

    def verified(self, tree_length: int, cache: Any) -> None:
        """Note that a pass read all waiting tokens, the root and a chain of this many nodes."""
        self._after = Filled(self.length + 1 + tree_length, cache)

    def commit(self, path: Sequence[int], *, later: bool = False) -> None:
        tree, hidden, after = self.tree, self.hidden_of_tree, self._after
        if tree is None:  # the prompt was read, and nothing drafted for it
            return
        self.tree = self.hidden_of_tree = None
        self._after = NOTHING_READ
        if hidden is not None:
            self.hidden.append(hidden[: len(path) + 1])
        self.tokens += [tree.root, *tree.tokens[: len(path)].tolist()]
        if after.length == len(self.tokens):
            self.filled = after

    def copy_from(self, source: Slot, length: int | None = None) -> None:
        assert isinstance(source, ReplaySlot)
        self.tokens = source.tokens[:length]
        self._go_back(source, len(self.tokens))
        self.owner, self.version = source.owner, source.version
        hidden = source.all_hidden()
        self.hidden = [] if hidden is None else [hidden[: len(self.tokens)]]
        self.tree = None


class ReplayCache(Cache):
    """Slots whose caches ``transformers`` allocates."""

    @property
    def keeps_states(self) -> bool:
        return True

    def __init__(self, shared: Collection[Place], slots: int = 1) -> None:
        self._shared = shared
        super().__init__((), slots)

    def reserve(self, capacity: int, wished: int = 0) -> None:
        pass

    def _allocate(self, slots: int, capacity: int) -> None:
        self.storage = KVTensors([], [], capacity)
        self.slots = [ReplaySlot(self._shared) for _ in range(slots)]

    def saved(self, slot: int) -> Slot:
        copy = ReplaySlot(self._shared)
        copy.copy_from(self.slots[slot])
        return copy
