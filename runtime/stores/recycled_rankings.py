"""Rankings of the target model, recycled while decoding.

A ranking lists the most probable tokens after a context. It is stored in the row of the context's last token, and in
hashed rows for the last two to ``MAX_KEY_TOKENS`` tokens. A new ranking replaces the previous one for the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, Uncopyable, array_at, compiled, prefetch
from hdtool.runtime.stores.model_store import mix_hash

RANKING_TOKENS = 8
"""Number of tokens in a recycled ranking."""
MAX_KEY_TOKENS = 5
"""Maximum number of last tokens in the key of a ranking."""
ROWS_PER_LENGTH = 1 << 15
"""Number of hashed rows for each key length above 1."""
SHARE_UNIT = 1000
"""Integer that stands for a share of 1: recycled rankings store shares in thousandths."""
SHARE_SHARPNESS = 1.5
"""Exponent applied to probabilities before they are normalized to shares; above 1, it favors the best token."""

RANKING = np.dtype(
    [
        ("tokens", np.int32, RANKING_TOKENS),  # best first
        ("shares", np.int16, RANKING_TOKENS),
        ("tag", np.uint32),  # upper half of the hash, to detect collisions
        ("unused", np.uint8, 12),
    ]
)
"""A row of the table of recycled rankings; it fills exactly one cache line."""
ROW_BYTES = RANKING.itemsize
RECYCLED_TABLE = np.dtype(
    [
        ("rankings", np.int64),  # address of the rows; 0 before anything is kept
        ("vocabulary", np.int64),  # number of rows for single tokens
        ("max_key_tokens", np.int64),  # maximum key length; 0 before anything is kept
    ],
    align=True,
)


class RecycledRankings(Uncopyable):
    """Table of recycled rankings, allocated at the first ``keep`` or ``begin_with``."""

    def __init__(self) -> None:
        self.record = np.zeros(1, RECYCLED_TABLE)
        self._lines: Array | None = None
        none = np.zeros((0, RANKING_TOKENS), np.int64)  # to compile ``_keep`` before the first step needs it
        _keep(self.record, none, none, none.astype(np.float32))

    def clear(self) -> None:
        self._lines = None
        self.record[:] = np.zeros(1, RECYCLED_TABLE)

    def keep(self, tails: Array, tokens: Array, scores: Array, vocabulary: int) -> None:
        """Store a ranking for each node.

        Each row of ``tails`` holds a node's last tokens; the most probable node is first. ``tokens`` are the top
        tokens, best first, with their logits in ``scores``; nodes whose best logit is not finite are skipped.
        ``vocabulary`` is the size of the model's vocabulary.
        """
        if self._lines is None:
            self._allocate(vocabulary, MAX_KEY_TOKENS)
        _keep(self.record, tails, tokens, scores)

    def begin_with(self, known: Array, *, alone: bool) -> None:
        """Initialize the table with a ranking for each token of the vocabulary.

        A row of ``known`` holds the tokens of a ranking, then their probabilities in millionths. Later rankings
        replace these. With ``alone``, the table has no room for keys of several tokens.
        """
        max_key_tokens = 1 if alone else MAX_KEY_TOKENS
        self._allocate(len(known), max_key_tokens)
        self.record["max_key_tokens"] = 1
        with np.errstate(divide="ignore"):
            scores = np.log(known[:, RANKING_TOKENS:].astype(np.float32))
        _keep(self.record, np.arange(len(known)).reshape(-1, 1), known[:, :RANKING_TOKENS].astype(np.int64), scores)
        self.record["max_key_tokens"] = max_key_tokens

    def _allocate(self, vocabulary: int, max_key_tokens: int) -> None:
        rows = vocabulary + (max_key_tokens - 1) * ROWS_PER_LENGTH
        self._lines = np.zeros((rows + 1) * ROW_BYTES, np.uint8)  # one extra row for alignment
        self.record["rankings"] = -(-self._lines.ctypes.data // ROW_BYTES) * ROW_BYTES
        self.record["vocabulary"], self.record["max_key_tokens"] = vocabulary, max_key_tokens


@compiled
def _keep(memory: Array, tails: Array, tokens: Array, scores: Array) -> None:
    """Write a ranking for each node and key length; see ``RecycledRankings.keep``."""
    table = memory[0]
    rankings = rankings_of(table)
    shares = np.empty(RANKING_TOKENS)
    suffix_hashes = np.zeros(MAX_KEY_TOKENS + 1, np.uint64)
    for node in range(len(tails) - 1, -1, -1):  # write the most probable node last, so that its ranking stays
        if not np.isfinite(scores[node, 0]):
            continue
        for length in range(1, table.max_key_tokens + 1):
            suffix_hashes[length] = mix_hash(suffix_hashes[length - 1], tails[node, -length])
        prefetch_rankings(table, tails[node, -1], suffix_hashes)
        for rank in range(RANKING_TOKENS):
            shares[rank] = np.exp(SHARE_SHARPNESS * (scores[node, rank] - scores[node, 0]))
        shares *= SHARE_UNIT / shares.sum()
        for length in range(1, table.max_key_tokens + 1):
            row = row_of(table, tails[node, -1], suffix_hashes[length], length)
            if row >= 0:
                kept = rankings[row]
                kept.tag = tag_of(suffix_hashes[length])
                for rank in range(RANKING_TOKENS):
                    kept.tokens[rank], kept.shares[rank] = tokens[node, rank], int(shares[rank])


@compiled
def prefetch_rankings(table: Any, last: Any, suffix_hashes: Array) -> None:
    """Prefetch the rankings for all key lengths; ``suffix_hashes[n]`` is the hash of the last ``n`` tokens."""
    rankings = rankings_of(table)
    for length in range(1, table.max_key_tokens + 1):
        row = row_of(table, last, suffix_hashes[length], length)
        if row >= 0:
            prefetch(rankings, row)


@compiled
def tag_of(suffix_hash: np.uint64) -> Any:
    """Return the upper half of a hash, which detects collisions because it isn't used to select the row."""
    return np.uint32(suffix_hash >> np.uint64(32))


@compiled
def row_of(table: Any, last: Any, suffix_hash: np.uint64, length: int) -> int:
    """Return the row for a key of ``length`` tokens that has this hash and ends with ``last``; -1 if there is none."""
    if length > table.max_key_tokens or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    return int(
        table.vocabulary + (length - 2) * ROWS_PER_LENGTH + np.int64(suffix_hash & np.uint64(ROWS_PER_LENGTH - 1))
    )


@compiled
def rankings_of(table: Any) -> Array:
    """Return all rows of the table as an array."""
    return array_at(table.rankings, table.vocabulary + (table.max_key_tokens - 1) * ROWS_PER_LENGTH, RANKING)


@compiled
def kept_row(table: Any, last: Any, suffix_hash: np.uint64, length: int) -> int:
    """Like ``row_of``, but also return -1 if the row holds no ranking, or one for other tokens."""
    row = row_of(table, last, suffix_hash, length)
    if row >= 0 and rankings_of(table)[row].shares[0] > 0 and rankings_of(table)[row].tag == tag_of(suffix_hash):
        return row
    return -1
