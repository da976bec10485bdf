"""The suffix arrays of a corpus index: sorts the suffixes of a shard of tokens, and writes the arrays of all shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.data.documents import Tokens
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.stores.suffix_search import PREFIX_EVERY, PREFIX_TOKENS, ShardExtent

SORT_MEMORY_FACTOR = 8
"""Peak memory for sorting a shard, as a multiple of the size of its tokens; the output is included."""


class SortedShard(NamedTuple):
    """Arrays that lookups in a shard need besides its tokens."""

    suffixes: Tokens
    heads: Tokens
    sampled_prefixes: Tokens


def sort_shard(tokens: Tokens, end: int) -> SortedShard:
    """Return the lookup arrays of a shard's tokens, in which each document is followed by the token ``end``."""
    # Suffixes that start with an end token sort last, and no lookup needs them.
    suffixes = suffix_array(tokens)[: np.count_nonzero(tokens != end)]
    heads = np.zeros(end + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=end + 1)[:end], out=heads[1:])
    # A search stops at an end token, and the last token is an end token, so positions may be clamped to it.
    positions = suffixes[::PREFIX_EVERY, None] + np.arange(1, PREFIX_TOKENS + 1)
    return SortedShard(suffixes, heads, tokens[np.minimum(positions, len(tokens) - 1)])


@dataclass(frozen=True)
class ShardFiles:
    """Files that hold the tokens and the sorted arrays of all shards, each shard at its own offset."""

    documents: Path
    suffixes: Path
    heads: Path
    sampled_prefixes: Path
    width: np.dtype[Any]
    end: int

    def create(self) -> None:
        """Create empty output files, which ``write`` then fills."""
        for path in (self.suffixes, self.heads, self.sampled_prefixes):
            path.touch()

    def tokens(self, shard: ShardExtent) -> Tokens:
        return np.fromfile(self.documents, self.width, shard.tokens, offset=shard.token * self.width.itemsize)

    def write(self, number: int, shard: ShardExtent, done: SortedShard) -> None:
        for path, array, position in (
            (self.suffixes, done.suffixes, shard.suffix * 4),
            (self.heads, done.heads, number * (self.end + 1) * 4),
            (self.sampled_prefixes, done.sampled_prefixes, shard.prefix * PREFIX_TOKENS * self.width.itemsize),
        ):
            with open(path, "r+b") as stream:
                stream.seek(position)
                stream.write(np.ascontiguousarray(array).data)

    def sort(self, number: int, shard: ShardExtent) -> None:
        """Read, sort and write one shard."""
        self.write(number, shard, sort_shard(self.tokens(shard), self.end))


def suffix_array(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Return the positions of all tokens, sorted by the token sequence that starts at each.

    libdivsufsort sorts suffixes of bytes. Big-endian tokens compare like their bytes, so dropping the byte positions at
    which no token starts leaves the suffixes of tokens in order.
    """
    from pydivsufsort import divsufsort

    positions = divsufsort(tokens.astype(tokens.dtype.newbyteorder(">")).view(np.uint8))
    out = np.empty(len(tokens), np.uint32)
    _token_starts(positions, tokens.dtype.itemsize, out)
    return out


@compiled
def _token_starts(positions: Tokens, size: int, out: Tokens) -> None:
    count = 0
    for position in positions:
        if position % size == 0:
            out[count] = position // size
            count += 1
