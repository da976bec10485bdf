"""Live tables: the tokens of one conversation with hash chains through them, and recycled rankings of the target.

Recycled rankings are kept for each single token, and in hashed rows for several last tokens. A new ranking replaces the
previous one after the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, Ints, Uncopyable, array_at, compiled, prefetch
from hdtool.runtime.stores.model_store import mix_hash

CONTEXT_WINDOW = 1 << 15
"""Tokens of the conversation that are remembered; a power of two."""
CHAIN_HEADS = 1 << 15
CHAIN_LENGTHS = (1, 3)
"""How many last tokens the places of each chain of the conversation share."""
SHORT_CHAIN, LONG_CHAIN = range(2)
MAX_LATEST_VISITS = 4
"""Places that are visited for the latest one of a token, which other tokens of the same hash may precede."""
COMPARED_AT_ONCE = 256
"""Tokens that are compared at once; a power of two."""

CONTEXT_TABLE = np.dtype(
    [
        ("end", np.int64),  # tokens ever added: the place of the next one
        ("ring", np.int32, CONTEXT_WINDOW),
        ("before", np.int32, (2, CONTEXT_WINDOW)),  # by chain and place
        ("heads", np.int32, (2, CHAIN_HEADS)),  # by chain and hash: the latest place
    ],
    align=True,
)


class ContextTable:
    """A table in memory. Adding a token takes nanoseconds; the ring runs over what is too old."""

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
        """Make ``prompt`` the content of the table; returns how many of its tokens were added.

        The next turn of a conversation starts with the earlier ones, so that only its rest is new.
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
    """Return True if ``tokens`` start with what the table holds."""
    if table.end > len(tokens):
        return False
    place = max(np.int64(0), table.end - CONTEXT_WINDOW)
    while place < table.end:
        # Stretches without a branch or a turn of the ring are compared many tokens at a time.
        stop = min(table.end, (place | (COMPARED_AT_ONCE - 1)) + 1)
        start, differ = place & (CONTEXT_WINDOW - 1), np.int64(0)
        for offset in range(stop - place):
            differ |= np.int64(table.ring[start + offset]) ^ np.int64(tokens[place + offset])
        if differ != 0:
            return False
        place = stop
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
    """Add the token that follows the tokens so far."""
    place = table.end
    mark = np.uint64(0)
    for length in range(1, min(CHAIN_LENGTHS[LONG_CHAIN], place) + 1):
        mark = mix_hash(mark, table.ring[(place - length) & (CONTEXT_WINDOW - 1)])
        if length == CHAIN_LENGTHS[SHORT_CHAIN] or length == CHAIN_LENGTHS[LONG_CHAIN]:
            chain = SHORT_CHAIN if length == CHAIN_LENGTHS[SHORT_CHAIN] else LONG_CHAIN
            head = head_of(mark)
            table.before[chain, place & (CONTEXT_WINDOW - 1)] = table.heads[chain, head]
            table.heads[chain, head] = place
    table.ring[place & (CONTEXT_WINDOW - 1)] = token
    table.end = place + 1


@compiled
def latest_place(table: Any, token: Any) -> int:
    """The latest place of a token, but for that of the last token; -1 if there is none."""
    oldest = max(np.int64(0), table.end - CONTEXT_WINDOW)
    after = np.int64(table.heads[SHORT_CHAIN, head_of(mix_hash(np.uint64(0), token))])
    for _ in range(MAX_LATEST_VISITS):
        if after <= oldest:
            break
        if table.ring[(after - 1) & (CONTEXT_WINDOW - 1)] == token:
            return int(after - 1)
        after = np.int64(table.before[SHORT_CHAIN, after & (CONTEXT_WINDOW - 1)])
    return -1


@compiled
def head_of(mark: np.uint64) -> np.int64:
    """Where the chain of a hash begins; the high bits are the well mixed ones."""
    return np.int64((mark >> np.uint64(40)) & np.uint64(CHAIN_HEADS - 1))


RANKING_TOKENS = 8
"""Tokens of a recycled ranking."""
MAX_KEY_TOKENS = 5
"""The most last tokens that rankings are kept by."""
ROWS_PER_LENGTH = 1 << 15
"""For each of the longer lengths."""
SHARE_UNIT = 1000
"""Shares of recycled rankings are in thousandths."""
SHARE_SHARPNESS = 1.5
"""Shares are of probabilities raised to this power: the best token is chosen more often than its probability."""

RANKING = np.dtype(
    [
        ("tokens", np.int32, RANKING_TOKENS),  # best first
        ("shares", np.int16, RANKING_TOKENS),
        ("tag", np.uint32),  # the other half of the hash, which detects collisions
        ("unused", np.uint8, 12),
    ]
)
"""A row of the table of recycled rankings. It fills one cache line, so that it costs one cache miss."""
ROW_BYTES = RANKING.itemsize
RECYCLED_TABLE = np.dtype(
    [
        ("rankings", np.int64),  # address of the rows; 0 before anything is kept
        ("vocabulary", np.int64),  # rows for a single token
        ("longest", np.int64),  # last tokens that rows are kept by; 0 before anything is kept
    ],
    align=True,
)


class RecycledRankings(Uncopyable):
    """A table, which is allocated when the first ranking arrives."""

    def __init__(self) -> None:
        self.record = np.zeros(1, RECYCLED_TABLE)
        self._lines: Array | None = None
        none = np.zeros((0, RANKING_TOKENS), np.int64)  # compiled, or loaded from the cache, before a step needs it
        _keep(self.record, none, none, none.astype(np.float32))

    def clear(self) -> None:
        self._lines = None
        self.record[:] = np.zeros(1, RECYCLED_TABLE)

    def keep(self, tails: Array, tokens: Array, scores: Array, vocabulary: int) -> None:
        """Keep rankings of a model with so many tokens: the ``tokens`` with these logits after each of the ``tails``.

        The most probable tail comes first.
        """
        if self._lines is None:
            self._allocate(vocabulary, MAX_KEY_TOKENS)
        _keep(self.record, tails, tokens, scores)

    def begin_with(self, known: Array, *, alone: bool) -> None:
        """Begin with rankings of single tokens: rows of tokens and of their probabilities in millionths.

        Unless they stay ``alone``, the table has room for more, which replace these.
        """
        longest = 1 if alone else MAX_KEY_TOKENS
        self._allocate(len(known), longest)
        self.record["longest"] = 1
        with np.errstate(divide="ignore"):
            scores = np.log(known[:, RANKING_TOKENS:].astype(np.float32))
        _keep(self.record, np.arange(len(known)).reshape(-1, 1), known[:, :RANKING_TOKENS].astype(np.int64), scores)
        self.record["longest"] = longest

    def _allocate(self, vocabulary: int, longest: int) -> None:
        rows = vocabulary + (longest - 1) * ROWS_PER_LENGTH
        self._lines = np.zeros((rows + 1) * ROW_BYTES, np.uint8)  # one more, for alignment
        self.record["rankings"] = -(-self._lines.ctypes.data // ROW_BYTES) * ROW_BYTES
        self.record["vocabulary"], self.record["longest"] = vocabulary, longest


@compiled
def _keep(memory: Array, tails: Array, tokens: Array, scores: Array) -> None:
    """Keep the rankings of nodes with these last tokens, a row each; the most probable node comes first."""
    table = memory[0]
    rankings = rankings_of(table)
    shares = np.empty(RANKING_TOKENS)
    marks = np.zeros(MAX_KEY_TOKENS + 1, np.uint64)
    for node in range(len(tails) - 1, -1, -1):  # the most probable node last: its ranking stays
        if not np.isfinite(scores[node, 0]):
            continue
        for length in range(1, table.longest + 1):
            marks[length] = mix_hash(marks[length - 1], tails[node, -length])
        prefetch_rankings(table, tails[node, -1], marks)
        for place in range(RANKING_TOKENS):
            shares[place] = np.exp(SHARE_SHARPNESS * (scores[node, place] - scores[node, 0]))
        shares *= SHARE_UNIT / shares.sum()
        for length in range(1, table.longest + 1):
            row = row_of(table, tails[node, -1], marks[length], length)
            if row >= 0:
                kept = rankings[row]
                kept.tag = tag_of(marks[length])
                for place in range(RANKING_TOKENS):
                    kept.tokens[place], kept.shares[place] = tokens[node, place], int(shares[place])


@compiled
def prefetch_rankings(table: Any, last: Any, marks: Array) -> None:
    """Prefetch the rankings after the last tokens with these hashes, all at once."""
    rankings = rankings_of(table)
    for length in range(1, table.longest + 1):
        row = row_of(table, last, marks[length], length)
        if row >= 0:
            prefetch(rankings, row)


@compiled
def tag_of(mark: np.uint64) -> Any:
    """The half of a hash that does not select the row, to detect collisions."""
    return np.uint32(mark >> np.uint64(32))


@compiled
def row_of(table: Any, last: Any, mark: np.uint64, length: int) -> int:
    """The row of the table after ``length`` tokens of this hash, which end with ``last``; or -1."""
    if length > table.longest or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    return int(table.vocabulary + (length - 2) * ROWS_PER_LENGTH + np.int64(mark & np.uint64(ROWS_PER_LENGTH - 1)))


@compiled
def rankings_of(table: Any) -> Array:
    """All rows of the table of recycled rankings."""
    return array_at(table.rankings, table.vocabulary + (table.longest - 1) * ROWS_PER_LENGTH, RANKING)


@compiled
def kept_row(table: Any, last: Any, mark: np.uint64, length: int) -> int:
    """The row of the ranking that is kept after ``length`` tokens of this hash, or -1."""
    row = row_of(table, last, mark, length)
    if row >= 0 and rankings_of(table)[row].shares[0] > 0 and rankings_of(table)[row].tag == tag_of(mark):
        return row
    return -1
