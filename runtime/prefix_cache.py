"""Prefix caching: a prompt that begins as an earlier conversation did is read from where it differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.model.cache.slots import NEVER_CONTINUED, Cache, Slot

LEAST = 16
"""Shorter beginnings are read again: that takes less time than copying them."""


class Kept(NamedTuple):
    """A context that begins as a prompt does, in a slot of the cache or saved from one."""

    slot: Slot
    shared: int
    """Tokens that both begin with."""
    start: int
    """Those of them that are not read again."""


class PrefixCache:
    """Contexts that a prompt may continue: those that slots hold, and copies of what was overwritten there.

    Copies take up to a number of bytes; the one that was used longest ago is dropped first.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most = most_bytes
        self._saved: list[Slot] = []
        """The one that was used last is at the end."""

    @property
    def bytes(self) -> int:
        """Memory of the copies."""
        return sum(slot.bytes for slot in self._saved)

    def in_place(self, free: Iterable[Slot], owner: str, version: int, prompt: Sequence[int]) -> Kept | None:
        """The free slot that can be read on into from where it differs from a prompt."""
        return _longest(free, owner, version, prompt, least=1)

    def to_copy(self, held: Iterable[Slot], owner: str, version: int, prompt: Sequence[int]) -> Kept | None:
        """The longest beginning of a prompt that slots in use, or copies, hold."""
        self._saved = [slot for slot in self._saved if slot.version == version]
        found = _longest([*held, *self._saved], owner, version, prompt, least=LEAST - 1)
        if found and found.slot in self._saved:
            self._saved.remove(found.slot)
            self._saved.append(found.slot)
        return found

    def keep(self, cache: Cache, slot: int) -> None:
        """Copy what a slot holds, before it is overwritten; copies that it continues are dropped."""
        held = cache.slots[slot]
        tokens = held.tokens[: held.valid]
        if not self._most or len(tokens) < LEAST or held.version == NEVER_CONTINUED:
            return
        saved = cache.saved(slot)
        if saved.bytes > self._most:
            return
        self._saved = [
            one for one in self._saved if one.owner != saved.owner or common(one.tokens, tokens) < len(one.tokens)
        ]
        self._saved.append(saved)
        while self.bytes > self._most:
            self._saved.pop(0)


def _longest(slots: Iterable[Slot], owner: str, version: int, prompt: Sequence[int], *, least: int) -> Kept | None:
    """The slot from which most of a prompt need not be read again; its last token always is."""
    best = None
    for slot in slots:
        if slot.owner == owner and slot.version == version:
            shared = common(slot.tokens[: min(slot.valid, len(prompt) - 1)], prompt)
            start = slot.resumes_at(shared)
            if start >= max(least, best.start + 1 if best else 0):
                best = Kept(slot, shared, start)
    return best


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    size = min(len(first), len(second))
    if not size or first[0] != second[0]:
        return 0
    ones, others = (np.asarray(one[:size], np.int64) for one in (first, second))
    differ: npt.NDArray[np.bool_] = ones != others
    return int(differ.argmax()) if differ.any() else size
