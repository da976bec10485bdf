"""Finds and keeps contexts that later prompts can continue, and prefills the rest of a prompt, in pieces or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.core.cache_interface import NEVER_CONTINUED, AnyCache, AnySlot
from hdtool.runtime.core.engine_interface import Engine, Verified
from hdtool.runtime.core.tolerances import tolerance_of

MIN_CACHED_PREFIX = 16
"""Minimum length of a prefix that is copied; recomputing shorter ones is faster."""


class CachedPrefix(NamedTuple):
    """A cached context, in a slot or in a copy of a slot, that shares a prefix with a prompt."""

    slot: AnySlot
    shared: int
    """Length of the common prefix."""
    start: int
    """Number of tokens that are not recomputed."""


class PrefixCache:
    """Finds cached contexts that a prompt can continue, in slots and in copies of slots that were overwritten.

    The copies take up at most ``max_bytes``; the least recently used copy is evicted first.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._saved: list[AnySlot] = []
        """Copies of slots, the most recently used one last."""
        self._uses = 0

    @property
    def bytes(self) -> int:
        """Total size of the copies in bytes."""
        return sum(slot.bytes for slot in self._saved)

    def in_place(self, free: Iterable[AnySlot], owner: str, version: int, prompt: Sequence[int]) -> CachedPrefix | None:
        """Return the longest prefix of a prompt that a free slot holds and that can be continued there, or None.

        Also return None for a short prefix of a longer context that is worth keeping, as its rest would be overwritten.
        """
        found = _find_longest(free, owner, version, prompt, min_saved=1)
        if not found or found.start >= MIN_CACHED_PREFIX - 1:
            return found
        loses_context = found.slot.valid > found.shared and is_worth_keeping(found.slot)
        return None if loses_context else found

    def to_copy(self, held: Iterable[AnySlot], owner: str, version: int, prompt: Sequence[int]) -> CachedPrefix | None:
        """Return a prompt's longest prefix that a slot in use or a copy holds; None if it is too short to copy.

        Copies from an earlier ``version`` of the model are dropped, and the copy returned counts as used.
        """
        self._saved = [slot for slot in self._saved if slot.version == version]
        found = _find_longest([*held, *self._saved], owner, version, prompt, min_saved=MIN_CACHED_PREFIX - 1)
        if found and found.slot in self._saved:
            self._saved.remove(found.slot)
            self._saved.append(found.slot)
        return found

    def mark_used(self, slot: AnySlot) -> None:
        self._uses += 1
        slot.last_use = self._uses

    def keep(self, cache: AnyCache, slot: int, idle: Sequence[int] = ()) -> None:
        """Copy a context worth keeping before its slot is overwritten: to an ``idle`` slot without one, or new memory.

        If it fits in neither, it replaces the least recently used context of the idle slots, if that one is older.
        """
        held = cache.slots[slot]
        if not is_worth_keeping(held):
            return
        place = next((index for index in idle if not is_worth_keeping(cache.slots[index])), None)
        if place is None and not self._save(cache, slot):
            oldest = min(idle, key=lambda index: cache.slots[index].last_use, default=slot)
            place = oldest if cache.slots[oldest].last_use < held.last_use else None
        if place is not None:
            cache.copy(slot, to=place)

    def _save(self, cache: AnyCache, slot: int) -> bool:
        """Copy a slot to new memory, dropping copies of its prefixes and the least recently used ones over the limit.

        Return False, and drop nothing, if the copy does not fit.
        """
        if not self._max_bytes:
            return False
        try:
            saved = cache.saved(slot)
        except torch.OutOfMemoryError:
            return False
        if saved.bytes > self._max_bytes:
            return False
        tokens = saved.tokens[: saved.valid]
        self._saved = [
            slot_copy
            for slot_copy in self._saved
            if slot_copy.owner != saved.owner or common_prefix_length(slot_copy.tokens, tokens) < len(slot_copy.tokens)
        ]
        self._saved.append(saved)
        while self.bytes > self._max_bytes:
            self._saved.pop(0)
        return True


def is_worth_keeping(slot: AnySlot) -> bool:
    """Return True if a slot holds a context that may be continued and takes long enough to compute again."""
    return slot.valid >= MIN_CACHED_PREFIX and slot.version != NEVER_CONTINUED


def _find_longest(
    slots: Iterable[AnySlot], owner: str, version: int, prompt: Sequence[int], *, min_saved: int
) -> CachedPrefix | None:
    """Return the cached prefix that saves the most prefill, or None if none saves at least ``min_saved`` tokens.

    The last token of a prompt is always recomputed.
    """
    best = None
    for slot in slots:
        if slot.owner == owner and slot.version == version:
            shared = common_prefix_length(slot.tokens[: min(slot.valid, len(prompt) - 1)], prompt)
            start = slot.resumes_at(shared)
            if start >= max(min_saved, best.start + 1 if best else 0):
                best = CachedPrefix(slot, shared, start)
    return best


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    size = min(len(first), len(second))
    if not size or first[0] != second[0]:
        return 0
    ones, others = (np.asarray(tokens[:size], np.int64) for tokens in (first, second))
    differ: npt.NDArray[np.bool_] = ones != others
    return int(differ.argmax()) if differ.any() else size


PREFILL_CHUNK = 512
"""Maximum number of tokens prefilled in one pass after a cached prefix; it bounds the attention mask's size."""
PIECES, DEVICE_PIECES = (512, 128), (4096, 1024)
"""Number of tokens in a piece of a prompt, while no answer is running and while answers wait: on a CPU, on a device.

A device reads a thousand tokens in little more time than a hundred, because it reads the weights once for all.
"""
MIN_TAIL_PROMPT, TAIL_TOKENS = 256, 32
"""Recurrent states are saved ``TAIL_TOKENS`` before a prompt's end if over ``MIN_TAIL_PROMPT`` tokens are prefilled."""


class PromptReader:
    """Prefills one prompt into a slot, after the prompt's longest cached prefix."""

    def __init__(
        self, engine: Engine[Any], cache: AnyCache, first_free: int, prompt: Sequence[int], room: int, owner: str = ""
    ) -> None:
        """``room`` tokens may follow the prompt; slots from ``first_free`` on are not in use."""
        self._engine, self._cache, self._prompt = engine, cache, list(prompt)
        self._room, self._owner = room, owner
        self.slot = self._first_free = first_free
        self._reads_in_pieces = engine.reads_in_pieces(len(prompt))
        self.cached_tokens = 0
        """Number of tokens at the start of the prompt that were cached."""
        self._read = 0
        self._keeps_states = False
        """True if the recurrent states are saved after each pass."""
        self._cached_kv: list[torch.Tensor] | None = None
        """Cached keys and values of the first recomputed token, to compare with its new ones; None if not needed."""

    def begin(self, prefixes: PrefixCache | None) -> None:
        """Choose a slot, save the context that it loses, and load the prompt's longest cached prefix, if any."""
        slots, found, is_in_place = self._cache.slots, None, False
        self._keeps_states = self._reads_in_pieces and prefixes is not None and self._cache.keeps_states
        if prefixes and self._reads_in_pieces:
            found, is_in_place = self._find_prefix(prefixes)
            if self._keeps_states and self._engine.notice_silent_change(goes_on=found is not None):
                found = None
        version = self._engine.changes
        if found and is_in_place:
            self.slot = slots.index(found.slot)
        shared = found.shared if found else 0
        if prefixes and slots[self.slot].valid > (shared if is_in_place else 0):
            prefixes.keep(self._cache, self.slot, self._idle_slots(only_empty=is_in_place))
        if found and not is_in_place:
            self._cache.load(self.slot, found.slot, shared)
        slot = self._cache.slots[self.slot]
        if prefixes:
            prefixes.mark_used(slot)
        self._read = self.cached_tokens = found.start if found else 0
        if 0 < self._read < shared:
            slot.cut(shared)
            self._cached_kv = slot.at(self._read)
        slot.cut(self._read)
        slot.owner, slot.version = self._owner, version if self._reads_in_pieces else NEVER_CONTINUED

    def _find_prefix(self, prefixes: PrefixCache) -> tuple[CachedPrefix | None, bool]:
        """Return ``(prefix, in_place)``: the prefix saving the most prefill, if any, and whether a free slot has it."""
        slots, query = self._cache.slots, (self._owner, self._engine.changes, self._prompt)
        in_place = prefixes.in_place(slots[self._first_free :], *query)
        copied = prefixes.to_copy(slots[: self._first_free], *query)
        if copied and copied.start > (in_place.start if in_place else 0):
            return copied, False
        return in_place, in_place is not None

    def _idle_slots(self, *, only_empty: bool) -> list[int]:
        """Return the free slots besides the prompt's; with ``only_empty``, only those without a context to keep."""
        idle = [index for index in range(self._first_free, len(self._cache.slots)) if index != self.slot]
        return [index for index in idle if not (only_empty and is_worth_keeping(self._cache.slots[index]))]

    def read_piece(self, *, answers_wait: bool) -> Verified | None:
        """Prefill a piece of the prompt, a shorter one if answers wait for it; see ``read`` for the result."""
        return self.read((DEVICE_PIECES if self._engine.captures else PIECES)[answers_wait])

    @torch.inference_mode()
    def read(self, max_tokens: int | None = None) -> Verified | None:
        """Prefill at most ``max_tokens`` tokens, or the rest of the prompt if None.

        Once the whole prompt is prefilled, return a result with the logits after it, else None. A prompt that the
        engine cannot read in pieces is always prefilled as a whole.
        """
        if max_tokens is not None and self._reads_in_pieces:
            return self._read_piece(max_tokens)
        while (verified := self._read_piece(PREFILL_CHUNK if self._read else len(self._prompt))) is None:
            pass
        return verified

    def _end(self, max_tokens: int) -> int:
        """Return the position in the prompt at which the next pass ends.

        If states are saved, one pass ends ``TAIL_TOKENS`` before the end of a long prompt: the next turn can only
        continue from saved states, and its chat template changes the last tokens of this prompt.
        """
        whole = len(self._prompt)
        end = min(whole, self._read + max_tokens)
        has_tail = (
            self._keeps_states and whole - self.cached_tokens > MIN_TAIL_PROMPT and self._read < whole - TAIL_TOKENS
        )
        return min(end, whole - TAIL_TOKENS) if has_tail else end

    def _read_piece(self, max_tokens: int) -> Verified | None:
        first, end = self._read, self._end(max_tokens)
        room = len(self._prompt) - end + self._room
        verified = self._engine.prefill(self._cache, self.slot, self._prompt[first:end], first, room=room)
        is_same, self._cached_kv = self._is_same_model(first), None
        if not is_same:
            self._read = self.cached_tokens = 0
            return None
        self._read = end
        if self._keeps_states:
            self._cache.slots[self.slot].keep_states()
        return verified if end == len(self._prompt) else None

    def _is_same_model(self, position: int) -> bool:
        """Return True unless recomputing a cached token gave other keys and values than the cached ones.

        This detects weights written through ``data``, which torch's version counters do not.
        """
        return self._cached_kv is None or not _states_differ(self._cached_kv, self._cache.slots[self.slot].at(position))


def _states_differ(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Return True if, in any layer, the keys and values of one position differ by more than rounding errors."""
    for old, new in zip(before, after, strict=True):
        rows = old.float().flatten(1)
        distance = (new.float().flatten(1) - rows).abs().mean(1) / rows.std(1).clamp_min(1e-12)
        if not bool((distance <= tolerance_of(old.dtype)).all()):  # NaN differs
            return True
    return False
