"""An engine's cache: keys, values, recurrent states and tokens of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from hdtool.runtime.caches.kv_cache import KVTensors, LayerShape, StaticKVCache
from hdtool.runtime.caches.states import Snapshot, States, StateShape, kept
from hdtool.runtime.core.tree import DraftTree


class StatesOfTree(Protocol):
    """Recurrent states after each row of a verified tree."""

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        """Advance ``states`` from before the tree to the end of the path ``rows``, which starts with the root.

        ``slot`` is the index of the tree's slot in the pass.
        """
        ...


class Slot:
    """One sequence in a cache.

    The contents stay after the sequence's answer ends, until another sequence replaces them.
    """

    def __init__(self, kv: StaticKVCache) -> None:
        self.kv = kv
        self.tokens: list[int] = []
        """Accepted tokens."""
        self.hidden: list[torch.Tensor] = []
        """Hidden states of the accepted tokens, in parts to concatenate; empty if hidden states aren't recorded."""
        self.owner = ""
        """Tenant whose prompt the slot holds; prompts of other tenants never continue it."""
        self.version = 0
        """Number of changes to the model before the prompt was read, or ``NEVER_CONTINUED``."""
        self.last_use = 0
        """Number of prompts that a prefix cache had begun when the slot's one began."""
        self.tree: DraftTree | None = None
        """Last verified tree; None once a path of it is committed."""
        self.hidden_of_tree: torch.Tensor | None = None
        self.states_of_tree: StatesOfTree | None = None
        self.place_in_tree = 0
        """Index of this slot in the pass that verified the tree."""
        self.states_length = 0
        """Number of accepted tokens read into the states; -1 during an update, and after an interrupted one."""
        self.snapshots: list[Snapshot] = []
        """Copies of the states after fewer tokens, from which another prompt may continue."""

    @property
    def states(self) -> States | None:
        """Recurrent states, or None if the model has none."""
        return self.kv.storage.states

    @property
    def bytes(self) -> int:
        return self.kv.storage.bytes + sum(snapshot.states.bytes for snapshot in self.snapshots)

    def at(self, position: int) -> list[torch.Tensor]:
        """Return copies of the keys and values of one position, for all layers."""
        return self.kv.at(position)

    @property
    def length(self) -> int:
        """Number of accepted tokens."""
        return self.kv.length

    @property
    def valid(self) -> int:
        """Number of accepted tokens whose keys and values are in place; may be below ``length`` after an interrupt."""
        return min(len(self.tokens), self.kv.settled)

    def resumes_at(self, shared: int) -> int:
        """Return where to resume reading a prompt that has its first ``shared`` tokens in common with the slot.

        Without recurrent states, only the last shared token is read again, to compare its keys and values. With states,
        reading resumes at the longest length whose states exist, as the current states or in a snapshot.
        """
        if self.states is None:
            return max(0, shared - 1)
        lengths = [self.states_length, *(snapshot.length for snapshot in self.snapshots)]
        return max((length for length in lengths if length <= shared), default=0)

    def keep_states(self) -> None:
        """Add a copy of the current states to ``snapshots``."""
        if self.states and self.states_length > 0:
            self.snapshots = kept(self.snapshots, Snapshot(self.states_length, self.states.copy()))

    def cut(self, length: int) -> None:
        """Discard all but the first ``length`` tokens."""
        self._cut_states(length)
        self.kv.cut(length)
        del self.tokens[length:]
        if self.hidden:
            self.hidden = [torch.cat(self.hidden)[:length]] if length else []
        self.tree = self.states_of_tree = None

    def _cut_states(self, length: int) -> None:
        """Restore the states after ``length`` tokens from a snapshot; without one, mark later states as unusable."""
        if self.states is None:
            return
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.length <= length]
        match = next((snapshot for snapshot in self.snapshots if snapshot.length == length), None)
        if length == 0:
            self.states_length = 0
        elif match and self.states_length != length:
            self.states_length = -1
            self.states.copy_from(match.states)
            self.states_length = length
        elif self.states_length > length:
            self.states_length = -1
        self.kv.begin_states(has_begun=self.states_length > 0)

    def begin_reading(self) -> None:
        """Mark the states as being updated by a pass over further tokens; ``extend`` ends the update."""
        assert self.states is None or self.states_length == self.length, "the states are those of another length"
        self.states_length = -1

    def extend(self, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Append accepted tokens that a pass has read, and their hidden states if these are recorded."""
        if hidden is not None:  # first, so that an interrupt can leave too many hidden states but never too few
            self.hidden.append(hidden)
        self.kv.length += len(tokens)
        self.states_length = self.kv.length
        self.tokens += tokens

    def begin_commit(self, tree: DraftTree, hidden: torch.Tensor | None) -> None:
        """Note the tree that a pass verifies, of which ``commit`` then accepts a path, and its hidden states."""
        self.tree, self.hidden_of_tree = tree, hidden

    def hold_states(self, states: StatesOfTree | None, place: int = 0) -> None:
        """Note the recurrent states after each row of the verified tree; ``place`` is the slot's index in the pass."""
        self.states_of_tree, self.place_in_tree = states, place

    def commit(self, path: Sequence[int], *, deferred: bool = False) -> None:
        """Accept the root and the nodes of ``path``.

        With ``deferred``, moving their positions in the cache may be left to the next captured step.
        """
        tree, hidden = self.tree, self.hidden_of_tree
        if tree is None:  # the prompt was read, but no tree verified
            return
        self.tree = self.hidden_of_tree = None
        rows = [0, *(node + 1 for node in path)]
        if hidden is not None:
            self.hidden.append(select_rows(hidden, rows))
        self.kv.commit(1, path, deferred=deferred)
        if self.states and self.states_of_tree:
            self.states_length = -1
            self.states_of_tree.commit(self.place_in_tree, rows, self.states)
            self.states_length, self.states_of_tree = self.kv.length, None
        self.tokens.append(tree.root)
        self.tokens += [int(tree.tokens[node]) for node in path]

    def all_hidden(self) -> torch.Tensor | None:
        """Return the hidden states of all accepted tokens, or None if they aren't recorded."""
        if len(self.hidden) > 1:
            self.hidden = [torch.cat(self.hidden)]
        return self.hidden[0] if self.hidden else None

    def copy_from(self, source: Slot, length: int | None = None) -> None:
        """Copy the first ``length`` tokens of another slot, by default all, with their keys, values and states."""
        self.kv.copy_from(source.kv, length)
        self._copy_states(source)
        self.tokens = source.tokens[: self.kv.length]
        self.owner, self.version, self.last_use = source.owner, source.version, source.last_use
        hidden = source.all_hidden()
        self.hidden = [] if hidden is None else [hidden[: self.kv.length]]
        self.tree = None

    def _copy_states(self, source: Slot) -> None:
        if self.states is None or source.states is None:
            return
        self.states_length = -1
        if 0 <= source.states_length <= self.kv.length:
            self.states.copy_from(source.states)
            self.states_length = source.states_length
        self.snapshots = [snapshot for snapshot in source.snapshots if snapshot.length <= self.kv.length]
        self.kv.begin_states(has_begun=self.states_length > 0)


class Cache:
    """Slots for sequences that are decoded together; slots in use come first."""

    @property
    def keeps_states(self) -> bool:
        """True if a prompt can continue a context only at lengths whose states were kept."""
        return bool(self.storage.states)

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int = 1,
        capacity: int = 0,
        state_shapes: Sequence[StateShape] = (),
    ) -> None:
        self._shapes, self._state_shapes = shapes, state_shapes
        self.number = 0
        """Number that identifies the cache in all processes of a tensor-parallel model."""
        self.user: object = None
        """Decoding loop whose answers the cache holds; None if the cache is free."""
        self.slots: list[Slot] = []
        self._allocate(slots, capacity)

    @property
    def capacity(self) -> int:
        return self.storage.capacity

    @torch.inference_mode()
    def reserve(self, capacity: int, wished: int = 0) -> None:
        """Grow each slot to ``capacity`` positions, or to ``wished`` if that is more and memory allows.

        The slots keep their contents.
        """
        if capacity <= self.storage.capacity:
            return
        if wished > capacity:
            with suppress(torch.OutOfMemoryError):
                return self.reserve(wished)
        if not any(slot.length for slot in self.slots):
            self._allocate(len(self.slots), 0)  # frees the old tensors before larger ones are allocated
        self._allocate(len(self.slots), capacity)

    @torch.inference_mode()
    def fill_unread(self, slot: int, tokens: Sequence[int], room: int) -> None:
        """Fill a slot with tokens that no pass reads, to time later passes; reserve ``room`` more positions."""
        self.reserve(len(tokens) + room)
        for keys, values in self.slots[slot].kv.storage.layers:
            for numbers in (keys, values):
                numbers.fill_(0.01)  # unwritten pages all map to one zero page, which stays in the CPU's cache
        self.slots[slot].extend(tokens, None)

    def _allocate(self, slots: int, capacity: int) -> None:
        storage = KVTensors.for_layers(self._shapes, capacity, slots, self._state_shapes)
        # Passes recognize a storage by its identity, so a single slot must use the storage itself, not a view.
        parts = [storage] if slots == 1 else [storage.slot_view(slot) for slot in range(slots)]
        new_slots = [Slot(StaticKVCache(part)) for part in parts]
        for new, before in zip(new_slots, self.slots, strict=False):
            new.copy_from(before)
        self.storage, self.slots = (
            storage,
            new_slots,
        )  # last, so that an interrupt leaves the old storage with all of its slots

    @torch.inference_mode()
    def move(self, slot: int, to: int) -> None:
        self.slots[to].copy_from(self.slots[slot])

    @torch.inference_mode()
    def swap(self, first: int, second: int) -> None:
        """Exchange two slots. If memory is short, ``second`` replaces ``first`` instead."""
        try:
            copy = self.saved(first)
        except torch.OutOfMemoryError:
            return self.move(second, to=first)
        self.slots[first].copy_from(self.slots[second])
        self.slots[second].copy_from(copy)

    @torch.inference_mode()
    def saved(self, slot: int) -> Slot:
        """Return a copy of a slot in newly allocated tensors."""
        held = self.slots[slot]
        copy = Slot(StaticKVCache(KVTensors.for_layers(self._shapes, held.length, 1, self._state_shapes)))
        copy.copy_from(held)
        return copy

    @torch.inference_mode()
    def load(self, slot: int, saved: Slot, length: int) -> None:
        """Copy the first ``length`` tokens of a saved slot into slot number ``slot``; grow the cache if needed."""
        self.reserve(length)
        self.slots[slot].copy_from(saved, length)


def select_rows(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given rows, copied in contiguous ranges: indexing a GPU tensor with a list would synchronize."""
    starts = [place for place, row in enumerate(rows) if place == 0 or row != rows[place - 1] + 1]
    ranges = zip(starts, [*starts[1:], len(rows)], strict=True)
    return torch.cat([hidden[rows[start] : rows[stop - 1] + 1] for start, stop in ranges])
