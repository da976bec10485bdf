"""Contexts that stay in memory after their answers: a prompt that begins like one of them is not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdtool.runtime.model.cache.kv_cache import StaticKVCache
from hdtool.runtime.model.cache.prompt_reader import Prefix

LEAST = 16
"""Shorter beginnings are read again: that takes less time than copying them."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Kept:
    owner: str
    tokens: Tokens
    cache: StaticKVCache


class PrefixCache:
    """The latest contexts, up to a number of bytes; the one that was used longest ago is dropped first."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: list[_Kept] = []
        """The one that was used last is at the end."""
        self._changes = 0

    def drop_if_changed(self, changes: int) -> None:
        """Drop all contexts if the model changed since, by the number of its changes."""
        if changes != self._changes:
            self._kept, self._changes = [], changes

    @property
    def bytes(self) -> int:
        return sum(kept.cache.storage.bytes for kept in self._kept)

    def longest(self, owner: str, prompt: Sequence[int]) -> Prefix | None:
        """The kept context of an owner that shares the longest beginning with a prompt."""
        wanted = np.asarray(prompt, np.int64)
        best, shared = None, LEAST - 1
        for place, kept in enumerate(self._kept):
            if kept.owner == owner and (common := _common(kept.tokens, wanted)) > shared:
                best, shared = place, common
        if best is None:
            return None
        self._kept.append(self._kept.pop(best))
        return self._kept[-1].cache, shared

    def keep(self, owner: str, tokens: Sequence[int], cache: StaticKVCache) -> None:
        """Keep a context, which belongs to the cache from now on; those that begin it are dropped."""
        if len(tokens) < LEAST or cache.storage.bytes > self._most:
            return
        context = np.asarray(tokens, np.int64)
        self._kept = [
            kept for kept in self._kept if kept.owner != owner or _common(kept.tokens, context) < len(kept.tokens)
        ]
        self._kept.append(_Kept(owner, context, cache))
        while self.bytes > self._most:
            self._kept.pop(0)


def _common(first: Tokens, second: Tokens) -> int:
    """The number of tokens that both begin with."""
    size = min(len(first), len(second))
    differ = first[:size] != second[:size]
    return int(differ.argmax()) if differ.any() else size
