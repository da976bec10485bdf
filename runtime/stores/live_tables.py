"""Tables updated while decoding: a conversation's tokens with hash chains, and recycled rankings of the target model.

A ranking lists the most probable tokens after a context. It is stored in the row of the context's last token, and in
hashed rows for the last two to ``MAX_KEY_TOKENS`` tokens. A new ranking replaces the previous one for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, Ints, Uncopyable, array_at, compiled, prefetch
from hdtool.runtime.stores.model_store import mix_hash

CONTEXT_WINDOW = 1 << 15
"""Number of latest tokens of the conversation that the table holds; a power of two."""
CHAIN_HEADS = 1 << 15
CHAIN_LENGTHS = (1, 3)
"""Numbers of preceding tokens that define the two kinds of chains: all positions in a chain follow the same tokens."""
SHORT_CHAIN, LONG_CHAIN = range(2)
MAX_LATEST_VISITS = 4
"""Maximum number of chain entries visited to find a token's latest position; other tokens may share the chain."""
COMPARED_AT_ONCE = 256
"""Number of tokens compared without a branch; a power of two."""

CONTEXT_TABLE = np.dtype(
    [
        ("end", np.int64),  # number of tokens ever added, which is the position of the next
        ("ring", np.int32, CONTEXT_WINDOW),
        ("previous", np.int32, (2, CONTEXT_WINDOW)),  # previous position in the chain, by kind of chain and position
        ("heads", np.int32, (2, CHAIN_HEADS)),  # latest position, by kind of chain and hash
    ],
    align=True,
)


class ContextTable:
    """The latest tokens of a conversation, with hash chains for prompt lookup.

    Once the table is full, the oldest tokens are overwritten.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(1, CONTEXT_TABLE)
        self.reset()

    def __len__(self) -> int:
        return int(self.memory["end"][0])

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def reset(self) -> None:
        clear(self.memory[0])

    def read(self, prompt: Sequence[int] | Ints) -> int:
        """Make ``prompt`` the content of the table, and return how many tokens were appended.

        If the prompt starts with the current content, as at a conversation's next turn, the table is only extended;
        otherwise it is rebuilt.
        """
        tokens = np.asarray(prompt, np.int64)
        known = len(self)
        if not holds(self.memory[0], tokens):
            self.reset()
            known = 0
        self.add(tokens[known:])
        return len(tokens) - known

    def add(self, tokens: Sequence[int] | Ints) -> None:
        _add_all(self.memory, np.asarray(tokens, np.int64))


@compiled
def holds(table: Any, tokens: Ints) -> bool:
    """Return True if ``tokens`` start with the content of the table."""
    if table.end > len(tokens):
        return False
    position = max(np.int64(0), table.end - CONTEXT_WINDOW)
    while position < table.end:
        # Compare runs that don't wrap around the ring, without branches.
        stop = min(table.end, (position | (COMPARED_AT_ONCE - 1)) + 1)
        start, differ = position & (CONTEXT_WINDOW - 1), np.int64(0)
        for offset in range(stop - position):
            differ |= np.int64(table.ring[start + offset]) ^ np.int64(tokens[position + offset])
        if differ != 0:
            return False
        position = stop
    return True


@compiled
def clear(table: Any) -> None:
    table.end = 0
    table.heads[:] = -1


@compiled
def _add_all(memory: Ints, tokens: Ints) -> None:
    for token in tokens:
        add(memory[0], token)


@compiled
def add(table: Any, token: Any) -> None:
    """Append a token, and link its position into a short chain and a long chain."""
    position = table.end
    suffix_hash = np.uint64(0)
    for length in range(1, min(CHAIN_LENGTHS[LONG_CHAIN], position) + 1):
        suffix_hash = mix_hash(suffix_hash, table.ring[(position - length) & (CONTEXT_WINDOW - 1)])
        if length == CHAIN_LENGTHS[SHORT_CHAIN] or length == CHAIN_LENGTHS[LONG_CHAIN]:
            chain = SHORT_CHAIN if length == CHAIN_LENGTHS[SHORT_CHAIN] else LONG_CHAIN
            head = head_of(suffix_hash)
            table.previous[chain, position & (CONTEXT_WINDOW - 1)] = table.heads[chain, head]
            table.heads[chain, head] = position
    table.ring[position & (CONTEXT_WINDOW - 1)] = token
    table.end = position + 1


@compiled
def latest_position(table: Any, token: Any) -> int:
    """Return a token's latest position, ignoring the last position of the table; -1 if none is found."""
    oldest = max(np.int64(0), table.end - CONTEXT_WINDOW)
    after = np.int64(table.heads[SHORT_CHAIN, head_of(mix_hash(np.uint64(0), token))])
    for _ in range(MAX_LATEST_VISITS):
        if after <= oldest:
            break
        if table.ring[(after - 1) & (CONTEXT_WINDOW - 1)] == token:
            return int(after - 1)
        after = np.int64(table.previous[SHORT_CHAIN, after & (CONTEXT_WINDOW - 1)])
    return -1


@compiled
def head_of(suffix_hash: np.uint64) -> np.int64:
    """Return the index of the chain for a hash, taken from the hash's high bits, which are mixed best."""
    return np.int64((suffix_hash >> np.uint64(40)) & np.uint64(CHAIN_HEADS - 1))


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
    """Table of recycled rankings, allocated when the first ranking is kept."""

    def __init__(self) -> None:
        self.record = np.zeros(1, RECYCLED_TABLE)
        self._lines: Array | None = None
        none = np.zeros((0, RANKING_TOKENS), np.int64)  # to compile ``_keep`` before the first step needs it
        _keep(self.record, none, none, none.astype(np.float32))

    def clear(self) -> None:
        self._lines = None
        self.record[:] = np.zeros(1, RECYCLED_TABLE)

    def keep(self, tails: Array, tokens: Array, scores: Array, vocabulary: int) -> None:
        """Store a ranking per node. Each row of ``tails`` holds a node's last tokens; the most probable node is first.

        ``tokens`` are the top tokens, best first, with their logits in ``scores``; nodes whose best logit is not finite
        are skipped. ``vocabulary`` is the size of the model's vocabulary.
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
