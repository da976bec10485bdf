"""Recycled logits: what the target thought likely at nodes that it then did not take.

For each verified node the best next tokens and their shares, kept by the node's last token and, hashed,
by its last two and three. Nothing is kept before the first is recycled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from hdtool.runtime.memory import array_at

BEST = 8
WHOLE = 1000
"""Shares are in thousandths."""
LONGEST_NODE = 3
HASHED_ROWS = 1 << 15
"""For each of the longer lengths."""

RECYCLED = np.dtype(
    [
        ("tokens", np.int64),  # address of the tokens by row, best first; 0 before anything is recycled
        ("shares", np.int64),
        ("vocabulary", np.int64),  # rows for a single token
        ("longest", np.int64),  # tokens of a node that are looked at
    ],
    align=True,
)

Array = npt.NDArray[Any]


class Recycled:
    """The table; ``longest`` of 1 keeps by the last token alone."""

    def __init__(self, longest: int) -> None:
        self.memory = np.zeros(1, RECYCLED)
        self._longest = longest
        self._arrays: tuple[Array, ...] = ()

    @torch.inference_mode()
    def keep(self, logits: torch.Tensor, tails: Array) -> None:
        """Keep what the target thought after nodes whose last tokens are the rows of ``tails``."""
        if not self._arrays:
            self._allocate(logits.shape[-1])
        scores, tokens = logits.topk(min(BEST, logits.shape[-1]))
        shares = (scores.float().softmax(-1) * WHOLE).int()
        _keep(self.memory, tails, tokens.int().cpu().numpy(), shares.cpu().numpy())

    def _allocate(self, vocabulary: int) -> None:
        rows = vocabulary + (self._longest - 1) * HASHED_ROWS
        self._arrays = np.zeros((rows, BEST), np.int32), np.zeros((rows, BEST), np.int32)
        for field, array in zip(("tokens", "shares"), self._arrays, strict=True):
            self.memory[field] = array.ctypes.data
        self.memory["vocabulary"], self.memory["longest"] = vocabulary, self._longest


@njit(cache=True, nogil=True)
def _keep(memory: Array, tails: Array, tokens: Array, shares: Array) -> None:
    table = memory[0]
    for node in range(len(tails)):
        for length in range(1, table.longest + 1):
            row = row_of(table, tails[node], length)
            if row >= 0:
                for place in range(tokens.shape[1]):
                    kept_tokens(table)[row, place] = tokens[node, place]
                    kept_shares(table)[row, place] = shares[node, place]


@njit(cache=True, nogil=True)
def row_of(table: Any, tail: Array, length: int) -> int:
    """Where the table keeps what followed the last tokens of ``tail``, or -1."""
    last = tail[len(tail) - 1]
    if length > table.longest or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    mark = np.uint64(0)
    for back in range(1, length + 1):
        # Another hash than the model store's: whatever collides here shall not collide there.
        mark = (mark ^ np.uint64(tail[len(tail) - back] + 1)) * np.uint64(0x9E3779B97F4A7C15)
        mark ^= mark >> np.uint64(29)
    return int(table.vocabulary + (length - 2) * HASHED_ROWS + np.int64(mark & np.uint64(HASHED_ROWS - 1)))


@njit(cache=True, nogil=True)
def kept_tokens(table: Any) -> Array:
    return array_at(table.tokens, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int32)


@njit(cache=True, nogil=True)
def kept_shares(table: Any) -> Array:
    return array_at(table.shares, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int32)
