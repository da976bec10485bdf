"""Slots that hold caches of ``transformers`` of any kind, which are never changed: each pass is made on a copy.

A cache cannot lose its last tokens. After a rejected draft a slot keeps the cache from before the pass, and the
accepted tokens wait: they are read again at the head of the next pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from hdtool.runtime.model.cache.kv_cache import KVTensors, StaticKVCache
from hdtool.runtime.model.cache.library_copies import Place, bytes_of, copied, with_views_of
from hdtool.runtime.model.cache.slots import Cache, Slot
from hdtool.runtime.model.cache.states import MOST_SNAPSHOTS


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
        """Those after fewer tokens, from which another prompt may go on."""
        self._after = NOTHING_READ
        """What the pass over a chain left, of which nothing is accepted yet."""

    @property
    def bytes(self) -> int:
        return bytes_of(one.cache for one in (self.filled, *self.older))

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
        return max((one.length for one in (self.filled, *self.older) if one.length <= shared), default=0)

    def keep_states(self) -> None:
        before = [one for one in self.older if 0 < one.length < self.filled.length]
        shortened = [Filled(one.length, with_views_of(self.filled.cache, one.cache, self._shared)) for one in before]
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

    def _go_back(self, other: ReplaySlot, length: int) -> None:
        """Take over the longest cache of a slot that has no more than so many tokens."""
        found = [one for one in (*other.older, other.filled) if one.length <= length]
        self.older = [one for one in other.older if one.length <= length]
        self.filled = max(found, key=lambda one: one.length, default=NOTHING_READ)

    def read(self, tokens: Sequence[int], cache: Any, hidden: torch.Tensor | None) -> None:
        """Accept tokens that a pass has read after all others."""
        if hidden is not None:
            self.hidden.append(hidden)
        self.tokens += tokens
        self.filled = Filled(len(self.tokens), cache)

    def verified(self, tree_length: int, cache: Any) -> None:
        """A pass has read all waiting tokens, the root and a chain of so many nodes."""
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

    def copy_from(self, other: Slot, length: int | None = None) -> None:
        assert isinstance(other, ReplaySlot)
        self.tokens = other.tokens[:length]
        self._go_back(other, len(self.tokens))
        self.owner, self.version = other.owner, other.version
        hidden = other.all_hidden()
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
