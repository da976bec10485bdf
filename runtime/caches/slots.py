"""An engine's cache: keys, values, recurrent states and tokens of one or more sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hdtool.runtime.caches.accepted_path_moves import select_rows
from hdtool.runtime.caches.kv_cache import KVTensors, LayerShape, StaticKVCache
from hdtool.runtime.caches.recurrent_states import KeptStates, SlotStates, States, StateShape
from hdtool.runtime.caches.transformers_views import SlotKVCache
from hdtool.runtime.core.tree import DraftTree, rows_of


class Slot:
    """One sequence in a cache.

    The contents stay after the sequence's answer ends, until another sequence replaces them.
    """

    def __init__(self, kv: StaticKVCache, kept: KeptStates) -> None:
        self.kv, self.kept = kv, kept
        self.tokens: list[int] = []
        """Accepted tokens."""
        self.hidden: list[torch.Tensor] = []
        """Hidden states of the accepted tokens, in parts to concatenate; empty if hidden states aren't recorded."""
        self.owner = ""
        """Tenant whose prompt the slot holds; prompts of other tenants never continue it."""
        self.version = 0
        """Number of changes to the model before the prompt was read, or ``cache_interface.NEVER_CONTINUED``."""
        self.last_use = 0
        """Time of the slot's last use, counted in prompts that a prefix cache has begun."""
        self.tree: DraftTree | None = None
        """Last verified tree; None once a path of it is committed."""
        self.hidden_of_tree: torch.Tensor | None = None

    @property
    def states(self) -> States | None:
        """Recurrent states, or None if the model has none."""
        return self.kv.storage.states

    @property
    def bytes(self) -> int:
        return self.kv.storage.bytes + self.kept.bytes

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
        """Return where to resume reading a prompt that has its first ``shared`` tokens in common with the slot."""
        return self.kept.resumes_at(shared)

    def keep_states(self) -> None:
        """Keep a copy of the current states, from which another prompt may continue."""
        self.kept.keep()

    def view(self, new: int) -> SlotKVCache:
        """Return a ``transformers`` cache for a pass that writes ``new`` positions, and mark these as written."""
        self.kv.mark_written(self.length + new)
        return SlotKVCache(self.kv.storage, [self.length], has_begun=self.kept.has_begun)

    def cut(self, length: int) -> None:
        """Discard all but the first ``length`` tokens; recurrent states are restored only if kept at that length."""
        self.kept.cut(length)
        self.kv.cut(length)
        del self.tokens[length:]
        if self.hidden:
            self.hidden = [torch.cat(self.hidden)[:length]] if length else []
        self.tree = None

    def begin_prefill(self) -> None:
        """Mark the states as being updated by a pass over further tokens; ``extend`` ends the update."""
        self.kept.begin_prefill(self.length)

    def extend(self, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Append accepted tokens that a pass has read, and their hidden states if these are recorded."""
        if hidden is not None:  # first, so that an interrupt can leave too many hidden states but never too few
            self.hidden.append(hidden)
        self.kv.length += len(tokens)
        self.kept.end_reading(self.length)
        self.tokens += tokens

    def begin_commit(self, tree: DraftTree, hidden: torch.Tensor | None) -> None:
        """Record the tree that a pass verifies, and the hidden states of its rows, until ``commit`` accepts a path."""
        self.tree, self.hidden_of_tree = tree, hidden

    def hold_states(self, states: Any, place: int = 0) -> None:
        """Hold a pass's ``StatesOfTree`` or ``Snapshot`` for ``commit``; ``place`` is the slot's index in the pass."""
        self.kept.hold(states, place)

    def commit(self, path: Sequence[int], *, deferred: bool = False) -> None:
        """Accept the root and the nodes of ``path``; do nothing if no tree was verified since the last commit.

        With ``deferred``, moving the nodes' positions in the cache may be left to the next captured step.
        """
        tree, hidden = self.tree, self.hidden_of_tree
        if tree is None:  # the prompt was read, but no tree verified
            return
        self.tree = self.hidden_of_tree = None
        rows = rows_of(path)
        if hidden is not None:
            self.hidden.append(select_rows(hidden, rows))
        self.kv.commit(1, path, deferred=deferred)
        self.kept.commit(rows, self.length)
        self.tokens += [tree.root, *[int(tree.tokens[node]) for node in path]]

    def all_hidden(self) -> torch.Tensor | None:
        """Return the hidden states of all accepted tokens, or None if they aren't recorded."""
        if len(self.hidden) > 1:
            self.hidden = [torch.cat(self.hidden)]
        return self.hidden[0] if self.hidden else None

    def copy_from(self, source: Slot, length: int | None = None) -> None:
        """Make this slot a copy of another up to ``length`` tokens, by default all valid ones; no tree is copied."""
        self.kv.copy_from(source.kv, length)
        self.kept.copy_from(source.kept, self.length)
        self.tokens = source.tokens[: self.kv.length]
        self.owner, self.version, self.last_use = source.owner, source.version, source.last_use
        hidden = source.all_hidden()
        self.hidden = [] if hidden is None else [hidden[: self.kv.length]]
        self.tree = None


class Cache:
    """Slots for sequences that are decoded together; slots in use come first."""

    @property
    def keeps_states(self) -> bool:
        """True if a prompt can continue a context only at lengths whose states were kept."""
        return self.slots[0].kept.keeps_states

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int = 1,
        capacity: int = 0,
        state_shapes: Sequence[StateShape] = (),
    ) -> None:
        self._shapes, self._state_shapes = shapes, state_shapes
        self.number = 0
        """Number that identifies the cache in all processes of a tensor-parallel model; otherwise 0."""
        self.user: object = None
        """Decoding loop whose answers the cache holds; None if the cache is free."""
        self.slots: list[Slot] = []
        self._allocate(slots, capacity)

    @property
    def capacity(self) -> int:
        return self.storage.capacity

    @torch.inference_mode()
    def reserve(self, capacity: int, wished: int = 0) -> None:
        """Make room for ``capacity`` positions per slot, or for ``wished`` if that is more and memory allows.

        Do nothing if the slots already have ``capacity`` positions; otherwise, they keep their contents.
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
        """Fill an empty slot with tokens and constant keys and values, for timing passes; ``room`` more may follow."""
        self.reserve(len(tokens) + room)
        for keys, values in self.slots[slot].kv.storage.layers:
            for numbers in (keys, values):
                numbers.fill_(0.01)  # unwritten pages all map to one zero page, which stays in the CPU's cache
        self.slots[slot].extend(tokens, None)

    def _allocate(self, slots: int, capacity: int) -> None:
        storage = KVTensors.for_layers(self._shapes, capacity, slots, self._state_shapes)
        # Passes recognize a storage by its identity, so a single slot must use the storage itself, not a view.
        parts = [storage] if slots == 1 else [storage.slot_view(slot) for slot in range(slots)]
        new_slots = [self._slot_of(part) for part in parts]
        for new, before in zip(new_slots, self.slots, strict=False):
            new.copy_from(before)
        # Last, so that an interrupt leaves the old storage with all of its slots.
        self.storage, self.slots = storage, new_slots

    def _slot_of(self, storage: KVTensors) -> Slot:
        """Return an empty slot that uses a storage for one sequence."""
        return Slot(StaticKVCache(storage), SlotStates(storage.states) if storage.states else KeptStates())

    def view(self, slots: int, new: int) -> SlotKVCache:
        """Return a ``transformers`` cache of the first slots, for a pass that writes ``new`` positions to each."""
        for slot in self.slots[:slots]:
            slot.kv.mark_written(slot.length + new)
        return SlotKVCache(self.storage, [slot.length for slot in self.slots[:slots]])

    @torch.inference_mode()
    def copy(self, slot: int, to: int) -> None:
        self.slots[to].copy_from(self.slots[slot])

    @torch.inference_mode()
    def swap(self, first: int, second: int) -> None:
        """Exchange two slots, or only copy ``second`` to ``first`` if memory is short."""
        try:
            copy = self.saved(first)
        except torch.OutOfMemoryError:
            return self.copy(second, to=first)
        self.slots[first].copy_from(self.slots[second])
        self.slots[second].copy_from(copy)

    @torch.inference_mode()
    def saved(self, slot: int) -> Slot:
        """Return a copy of a slot in newly allocated tensors."""
        held = self.slots[slot]
        copy = self._slot_of(KVTensors.for_layers(self._shapes, held.length, 1, self._state_shapes))
        copy.copy_from(held)
        return copy

    @torch.inference_mode()
    def load(self, slot: int, saved: Slot, length: int) -> None:
        """Copy the first ``length`` tokens of a saved slot into slot number ``slot``; grow the cache if needed."""
        self.reserve(length)
        self.slots[slot].copy_from(saved, length)
