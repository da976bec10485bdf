"""The shards of a corpus index, sorted: each by itself, wherever that is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.stores.suffix_search import SIGNPOST_EVERY, SIGNPOST_TOKENS, ShardPlace, signposts_in

Tokens = npt.NDArray[Any]

MEMORY_A_BYTE = 8
"""Bytes that sorting takes at most for each byte of tokens, what comes out included."""


class SortedShard(NamedTuple):
    """What look-ups need of a shard beside its tokens."""

    suffixes: Tokens
    heads: Tokens
    signposts: Tokens


def sorted_shard(tokens: Tokens, end: int) -> SortedShard:
    """Documents of token ids, each with ``end`` behind it."""
    # Nothing is ever looked up that starts with an end, and those suffixes sort last.
    suffixes = suffix_array(tokens)[: np.count_nonzero(tokens != end)]
    heads = np.zeros(end + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=end + 1)[:end], out=heads[1:])
    # The last token is an end, which no search looks behind.
    behind = suffixes[::SIGNPOST_EVERY, None] + np.arange(1, SIGNPOST_TOKENS + 1)
    return SortedShard(suffixes, heads, tokens[np.minimum(behind, len(tokens) - 1)])


@dataclass(frozen=True)
class ShardFiles:
    """Where the tokens of all shards lie and what becomes of them; each shard has a stretch of every file."""

    documents: Path
    suffixes: Path
    heads: Path
    signposts: Path
    width: np.dtype[Any]
    end: int

    def lay_out(self, shards: Sequence[ShardPlace]) -> None:
        """Give the files their sizes."""
        last = shards[-1]
        signposts = last.signpost + signposts_in(last.suffixes)
        for path, size in (
            (self.suffixes, (last.suffix + last.suffixes) * 4),
            (self.heads, len(shards) * (self.end + 1) * 4),
            (self.signposts, signposts * SIGNPOST_TOKENS * self.width.itemsize),
        ):
            with open(path, "wb") as stream:
                stream.truncate(size)

    def tokens(self, shard: ShardPlace) -> Tokens:
        return np.fromfile(self.documents, self.width, shard.tokens, offset=shard.token * self.width.itemsize)

    def write(self, number: int, shard: ShardPlace, done: SortedShard) -> None:
        for path, array, place in (
            (self.suffixes, done.suffixes, shard.suffix * 4),
            (self.heads, done.heads, number * (self.end + 1) * 4),
            (self.signposts, done.signposts, shard.signpost * SIGNPOST_TOKENS * self.width.itemsize),
        ):
            with open(path, "r+b") as stream:
                stream.seek(place)
                stream.write(np.ascontiguousarray(array).data)

    def sort(self, number: int, shard: ShardPlace) -> None:
        """One shard, from file to file."""
        self.write(number, shard, sorted_shard(self.tokens(shard), self.end))


def suffix_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Positions in the order of what follows from there on.

    libdivsufsort sorts bytes: those of big-endian tokens sort as the tokens do, and of the byte
    positions the ones where tokens start are the answer.
    """
    from pydivsufsort import divsufsort

    places = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    out = np.empty(len(tokens), np.uint32)
    _token_starts(places, tokens.dtype.itemsize, out)
    return out


@njit(cache=True)
def _token_starts(places: Tokens, size: int, out: Tokens) -> None:
    kept = 0
    for place in places:
        if place % size == 0:
            out[kept] = place // size
            kept += 1
