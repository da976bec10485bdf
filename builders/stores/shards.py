"""The shards of a corpus index: each is sorted alone, in whatever process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.stores.suffix_search import PREFIX_EVERY, PREFIX_TOKENS, ShardPlace

Tokens = npt.NDArray[Any]

MEMORY_A_BYTE = 8
"""Bytes that sorting takes at most for each byte of tokens, the output included."""


class SortedShard(NamedTuple):
    """The arrays that a shard's lookups need beside its tokens."""

    suffixes: Tokens
    heads: Tokens
    sampled_prefixes: Tokens


def sorted_shard(tokens: Tokens, end: int) -> SortedShard:
    """The sorted shard of documents of token ids, each with ``end`` after it."""
    # No lookup starts with an end token, and those suffixes sort last.
    suffixes = suffix_array(tokens)[: np.count_nonzero(tokens != end)]
    heads = np.zeros(end + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=end + 1)[:end], out=heads[1:])
    # The last token is an end, and no search reads further.
    places = suffixes[::PREFIX_EVERY, None] + np.arange(1, PREFIX_TOKENS + 1)
    return SortedShard(suffixes, heads, tokens[np.minimum(places, len(tokens) - 1)])


@dataclass(frozen=True)
class ShardFiles:
    """The files of tokens and of sorted shards; each shard has its own part of every file."""

    documents: Path
    suffixes: Path
    heads: Path
    sampled_prefixes: Path
    width: np.dtype[Any]
    end: int

    def create(self) -> None:
        """Create the files; each shard extends them as far as its parts go."""
        for path in (self.suffixes, self.heads, self.sampled_prefixes):
            path.touch()

    def tokens(self, shard: ShardPlace) -> Tokens:
        return np.fromfile(self.documents, self.width, shard.tokens, offset=shard.token * self.width.itemsize)

    def write(self, number: int, shard: ShardPlace, done: SortedShard) -> None:
        for path, array, place in (
            (self.suffixes, done.suffixes, shard.suffix * 4),
            (self.heads, done.heads, number * (self.end + 1) * 4),
            (self.sampled_prefixes, done.sampled_prefixes, shard.prefix * PREFIX_TOKENS * self.width.itemsize),
        ):
            with open(path, "r+b") as stream:
                stream.seek(place)
                stream.write(np.ascontiguousarray(array).data)

    def sort(self, number: int, shard: ShardPlace) -> None:
        """Sort one shard from file to file."""
        self.write(number, shard, sorted_shard(self.tokens(shard), self.end))


def suffix_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Positions in the order of the text from there on.

    libdivsufsort sorts bytes: big-endian tokens sort as their bytes do, and the result is the byte
    positions at which tokens start.
    """
    from pydivsufsort import divsufsort

    places = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    out = np.empty(len(tokens), np.uint32)
    _token_starts(places, tokens.dtype.itemsize, out)
    return out


@compiled
def _token_starts(places: Tokens, size: int, out: Tokens) -> None:
    kept = 0
    for place in places:
        if place % size == 0:
            out[kept] = place // size
            kept += 1
