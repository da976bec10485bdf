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
from hdtool.runtime.model_store import mixed

BEST = 8
WHOLE = 1000
"""Shares are in thousandths."""
LONGEST_NODE = 3
BLOCK = 64
"""Logits that are compared with the least of the best at once."""
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
        # Compiled, or loaded, before a step waits for it.
        tokens, scores = np.zeros((0, BEST), np.int64), np.zeros((0, BEST), np.float32)
        _best(scores, tokens, scores)
        _keep(self.memory, tokens, tokens, scores)

    @torch.inference_mode()
    def keep(self, logits: torch.Tensor, tails: Array) -> None:
        """Keep what the target thought after nodes whose last tokens are the rows of ``tails``."""
        if not self._arrays:
            self._allocate(logits.shape[-1])
        if logits.device.type == "cpu":
            # Torch takes ten times as long for this on a CPU.
            rows = logits.float().numpy()
            tokens, scores = np.zeros((len(rows), BEST), np.int64), np.full((len(rows), BEST), -np.inf, np.float32)
            _best(rows, tokens, scores)
        else:
            best = logits.float().topk(min(BEST, logits.shape[-1]))
            tokens, scores = best.indices.cpu().numpy(), best.values.cpu().numpy()
        _keep(self.memory, tails, tokens, scores)

    def _allocate(self, vocabulary: int) -> None:
        rows = vocabulary + (self._longest - 1) * HASHED_ROWS
        self._arrays = np.zeros((rows, BEST), np.int32), np.zeros((rows, BEST), np.int32)
        for field, array in zip(("tokens", "shares"), self._arrays, strict=True):
            self.memory[field] = array.ctypes.data
        self.memory["vocabulary"], self.memory["longest"] = vocabulary, self._longest


@njit(cache=True, nogil=True)
def _best(logits: Array, tokens: Array, scores: Array) -> None:
    """The best tokens of each row and their scores; most blocks have nothing to offer, as one quick look tells."""
    for row in range(len(logits)):
        least = scores[row, -1]
        for start in range(0, logits.shape[1], BLOCK):
            block = logits[row, start : start + BLOCK]
            better = 0
            for place in range(len(block)):
                better += block[place] > least
            if better:
                for place in range(len(block)):
                    if block[place] > least:
                        _insert(tokens[row], scores[row], start + place, block[place])
                        least = scores[row, -1]


@njit(cache=True, nogil=True)
def _insert(tokens: Array, scores: Array, token: int, score: float) -> None:
    place = len(scores)
    while place > 0 and scores[place - 1] < score:
        place -= 1
        if place + 1 < len(scores):
            tokens[place + 1], scores[place + 1] = tokens[place], scores[place]
    if place < len(scores):
        tokens[place], scores[place] = token, score


@njit(cache=True, nogil=True)
def _keep(memory: Array, tails: Array, tokens: Array, scores: Array) -> None:
    table = memory[0]
    all_tokens, all_shares = kept_tokens(table), kept_shares(table)
    for node in range(len(tails)):
        if not np.isfinite(scores[node, 0]):
            continue
        shares = np.exp(scores[node] - scores[node, 0])
        shares *= WHOLE / shares.sum()
        mark = np.uint64(0)
        for length in range(1, table.longest + 1):
            mark = mixed(mark, tails[node, -length])
            row = row_of(table, tails[node, -1], mark, length)
            if row >= 0:
                all_tokens[row], all_shares[row] = 0, 0
                for place in range(len(shares)):
                    all_tokens[row, place], all_shares[row, place] = tokens[node, place], np.int32(shares[place])


@njit(cache=True, nogil=True)
def row_of(table: Any, last: Any, mark: np.uint64, length: int) -> int:
    """Where the table keeps what followed ``length`` tokens of this hash, the ``last`` of them included; or -1."""
    if length > table.longest or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    return int(table.vocabulary + (length - 2) * HASHED_ROWS + np.int64(mark & np.uint64(HASHED_ROWS - 1)))


@njit(cache=True, nogil=True)
def kept_tokens(table: Any) -> Array:
    return array_at(table.tokens, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int32)


@njit(cache=True, nogil=True)
def kept_shares(table: Any) -> Array:
    return array_at(table.shares, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int32)
