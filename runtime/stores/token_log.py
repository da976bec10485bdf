"""Token logs: ring buffers of tokens with hash chains, and the search for the latest matches of a context.

Each position holds a token and the previous position that follows the same two tokens. The positions after a token pair
thus form a chain, latest first, as in LZ compressors; pairs whose hashes collide share one. Concurrent answers are
appended in separate blocks. Once the ring is full, the oldest tokens are overwritten.

The drafter uses this search for the history and for predictions, and ``inspect`` shows its matches and its latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled
from hdtool.runtime.stores.model_store import mix_hash, sequence_hash

CHAIN_KEY_TOKENS = 2
"""Number of preceding tokens whose hash selects the chain of a position."""
LOG_BLOCK = 64
"""Number of positions that an answer reserves at a time; a power of two."""
OVERLAP_TOKENS = 8
"""Number of preceding tokens copied to the start of an answer or non-adjacent block, to let matches extend there."""
INITIAL_LOG_POSITIONS, MAX_LOG_POSITIONS = 1 << 16, 1 << 20
"""Initial and default maximum number of positions in a ring."""
MAX_LOG_POSITION = (1 << 31) - (1 << 24)
"""Position after which a ring in memory is cleared, since positions have 32 bits."""
NO_TOKEN = -1
"""Marks empty positions between answers."""
NOBODY = -1
"""Owner of blocks that are never matched."""
TOKEN, PREVIOUS = range(2)
MAX_STALE_POSITIONS = 64
"""Maximum number of positions on a chain that a lookup skips because other processes appended them after ``end``."""

LOG = np.dtype(
    [
        ("end_at", np.int64),  # address of the end: the number of positions ever reserved
        ("entries", np.int64),  # address of the ring: a token and the previous position on its chain
        ("heads", np.int64),  # address of the latest position of each chain
        ("owners", np.int64),  # address of the owners of blocks, or 0
        ("size", np.int64),  # number of positions in the ring, a power of two
        ("chains", np.int64),  # number of chains, a power of two
    ],
    align=True,
)
LANE = np.dtype(
    [
        ("owner", np.int64),  # number of the answer
        ("position", np.int64),  # position of its next token
        ("stop", np.int64),  # end of its current block
        ("first", np.int64),  # start of its first block
        ("overlap", np.int64),  # number of tokens before the answer, which are on no chain
    ],
    align=True,
)


class TokenLog(Uncopyable):
    """A token log in memory that takes 12 bytes per position and grows up to ``max_positions``, a power of two."""

    def __init__(self, max_positions: int = MAX_LOG_POSITIONS, size: int = INITIAL_LOG_POSITIONS) -> None:
        self.max_positions = max_positions
        self.memory = np.zeros(1, LOG)
        self._end = np.zeros(1, np.int64)
        self._answers = 0
        self._allocate(min(size, max_positions))

    def __len__(self) -> int:
        """Return the number of positions in use."""
        return min(int(self._end[0]), len(self._entries))

    def lane(self) -> Ints:
        """Return a record that tracks the answer being appended; it can be reused for the next answer."""
        return np.zeros(1, LANE)

    def start(self, lane: Ints, tokens: Sequence[int] | Ints, *, learned: bool = False) -> None:
        """Begin an answer to the prompt ``tokens``.

        The prompt's last few tokens are copied in front of the answer, on no chain. With ``learned``, the whole prompt
        is appended instead, and can be matched.
        """
        self.grow()
        self._answers += 1
        ids = np.asarray(tokens if learned else tokens[-OVERLAP_TOKENS:], np.int64)
        start(self.memory, lane, self._answers, ids, min(CHAIN_KEY_TOKENS, len(ids)) if learned else len(ids))

    def append(self, lane: Ints, tokens: Sequence[int] | Ints) -> None:
        append_all(self.memory, lane, np.asarray(tokens, np.int64))

    def finish(self, lane: Ints) -> None:
        """End an answer, and free the rest of its block if nothing was reserved after it."""
        finish(self.memory, lane)

    def answer(self, lane: Ints) -> tuple[Ints, Ints]:
        """Return ``(before, tokens)``: the tokens before a lane's answer, and the tokens of the answer.

        Tokens that were overwritten are left out.
        """
        tokens, overlap = answer_of(self.memory, lane)
        return tokens[:overlap], tokens[overlap:]

    def discard(self, owner: int) -> None:
        """Exclude the blocks of an answer from later matches."""
        self._owners[self._owners == owner] = NOBODY

    def clear(self) -> None:
        self._end[0] = 0
        self._heads[:] = -1

    def _allocate(self, size: int) -> None:
        self._entries = np.full((size, 2), NO_TOKEN, np.int32)
        self._heads = np.full(size, -1, np.int32)
        self._owners = np.full(size // LOG_BLOCK, NOBODY, np.int32)
        self.memory["end_at"], self.memory["size"], self.memory["chains"] = self._end.ctypes.data, size, size
        self.memory["entries"], self.memory["heads"] = self._entries.ctypes.data, self._heads.ctypes.data
        self.memory["owners"] = self._owners.ctypes.data

    def grow(self) -> None:
        """Enlarge the ring if it is over half full, keeping positions; if position numbers would overflow, clear it."""
        size, end = len(self._entries), int(self._end[0])
        if end > MAX_LOG_POSITION:
            self.clear()
            return
        if size >= self.max_positions or 2 * end <= size:
            return
        entries, owners = self._entries, self._owners
        kept = np.arange(max(0, end - size), end)  # other lanes may have wrapped around since the last start
        while size < self.max_positions and 2 * end > size:
            size *= 2
        self._allocate(size)
        self._entries[kept & (size - 1)] = entries[kept & (len(entries) - 1)]
        kept = np.arange(kept[0] // LOG_BLOCK, end // LOG_BLOCK)
        self._owners[kept & (len(self._owners) - 1)] = owners[kept & (len(owners) - 1)]
        link_all(self.memory, end)


@compiled
def entries_of(log: Any) -> Ints:
    return array_at(log.entries, (log.size, 2), np.int32)


@compiled
def heads_of(log: Any) -> Ints:
    return array_at(log.heads, log.chains, np.int32)


@compiled
def owners_of(log: Any) -> Ints:
    return array_at(log.owners, log.size // LOG_BLOCK, np.int32)


@compiled
def end_of(log: Any) -> np.int64:
    return array_at(log.end_at, 1, np.int64)[0]  # type: ignore[no-any-return]


@compiled
def chain_of(log: Any, pair_hash: np.uint64) -> np.int64:
    """Return the index of a token pair's chain, taken from high bits of the pair's hash, which are mixed best."""
    return np.int64((pair_hash >> np.uint64(30)) & np.uint64(log.chains - 1))


@compiled
def latest(log: Any, pair_hash: np.uint64, end: Any) -> np.int64:
    """Return the latest position below ``end`` on the chain of a token pair; -1 if none is found."""
    entries, position = entries_of(log), np.int64(heads_of(log)[chain_of(log, pair_hash)])
    for _ in range(MAX_STALE_POSITIONS):
        if position < end:
            return position
        position = np.int64(entries[position & (log.size - 1), PREVIOUS])
    return np.int64(-1)


@compiled
def start(memory: Ints, lane: Ints, owner: int, tokens: Ints, unlinked: int) -> None:
    """Begin an answer by appending the tokens before it; the first ``unlinked`` of them are not linked to chains."""
    lane[0].owner, lane[0].position, lane[0].stop = owner, 0, 0
    lane[0].first, lane[0].overlap = 0, unlinked
    for at in range(len(tokens)):
        append(memory[0], lane[0], tokens[at], at >= unlinked)


@compiled
def append_all(memory: Ints, lane: Ints, tokens: Ints) -> None:
    for token in tokens:
        append(memory[0], lane[0], token, True)


@compiled
def finish(memory: Ints, lane: Ints) -> None:
    end = array_at(memory[0].end_at, 1, np.int64)
    if lane[0].stop > 0 and lane[0].stop == end[0]:
        end[0] = -(-(lane[0].position + 1) // LOG_BLOCK) * LOG_BLOCK  # a block has a single owner
    lane[0].stop = lane[0].position = 0


@compiled
def answer_of(memory: Ints, lane: Ints) -> tuple[Ints, int]:
    """Return the tokens in an answer's blocks, without the overlap between blocks, and how many precede the answer."""
    log, lane_record = memory[0], lane[0]
    entries, owners, mask, end = entries_of(log), owners_of(log), log.size - 1, end_of(log)
    if lane_record.stop == 0:
        return np.empty(0, np.int32), 0
    oldest = max(lane_record.first, end - log.size)
    tokens, count = np.empty(end - oldest, np.int32), 0
    position = stop = np.int64(-1)
    for block in range(oldest, end, LOG_BLOCK):
        if owners[(block & mask) // LOG_BLOCK] != lane_record.owner:
            continue
        if stop != block:
            position = np.int64(block if stop < 0 else block + OVERLAP_TOKENS)
        stop = np.int64(block + LOG_BLOCK)
        while position < stop and entries[position & mask, TOKEN] >= 0:
            tokens[count] = entries[position & mask, TOKEN]
            count += 1
            position += 1
    overlap = lane_record.overlap if oldest == lane_record.first else OVERLAP_TOKENS
    return tokens[:count], min(overlap, count)


@compiled
def append(log: Any, lane: Any, token: Any, linked: bool) -> None:
    """Append a token to a lane's answer; if ``linked``, also link its position to a chain."""
    if lane.position + 1 >= lane.stop or lane.stop - LOG_BLOCK < end_of(log) - log.size:
        _reserve(log, lane)
    entries, position = entries_of(log), lane.position
    if linked:
        link(log, position)
    entries[position & (log.size - 1), TOKEN] = token
    lane.position = position + 1


@compiled
def _reserve(log: Any, lane: Any) -> None:
    """Reserve a lane's next block; unless it is adjacent to the previous block, copy that block's last tokens to it.

    The last position of a block is only used if the next block is adjacent.
    """
    entries, owners, end = entries_of(log), owners_of(log), array_at(log.end_at, 1, np.int64)
    mask, first = log.size - 1, end[0]
    for position in range(first, first + LOG_BLOCK):
        entries[position & mask, TOKEN], entries[position & mask, PREVIOUS] = NO_TOKEN, -1
    owners[(first & mask) // LOG_BLOCK] = lane.owner
    end[0] = first + LOG_BLOCK
    old_position, old_stop, lane.position, lane.stop = lane.position, lane.stop, first, first + LOG_BLOCK
    if old_stop == 0:
        lane.first = first
        return
    if old_stop == first:
        lane.position = old_position
        return
    overlap_start = max(old_position - OVERLAP_TOKENS, old_stop - LOG_BLOCK, end[0] - log.size)
    for position in range(overlap_start, old_position):
        entries[lane.position & mask, TOKEN] = entries[position & mask, TOKEN]
        lane.position += 1


@compiled
def link(log: Any, position: Any) -> None:
    """Link a position to the chain of the two tokens before it, if both exist."""
    entries, mask = entries_of(log), log.size - 1
    pair_hash = np.uint64(0)
    for length in range(1, CHAIN_KEY_TOKENS + 1):
        token = entries[(position - length) & mask, TOKEN] if position >= length else np.int32(NO_TOKEN)
        if token < 0:
            return
        pair_hash = mix_hash(pair_hash, token)
    entries[position & mask, PREVIOUS] = latest(log, pair_hash, position)
    heads_of(log)[chain_of(log, pair_hash)] = position


@compiled
def link_all(memory: Ints, end: int) -> None:
    """Build the chains of a ring from its tokens."""
    log = memory[0]
    entries, mask = entries_of(log), log.size - 1
    for position in range(max(0, end - log.size), end):
        entries[position & mask, PREVIOUS] = -1
        if entries[position & mask, TOKEN] >= 0:
            link(log, position)


MAX_MATCH_TOKENS = 32
"""Maximum match length in tokens."""
MAX_MATCHES = 32
"""Maximum number of positions found for a context."""


@compiled
def search(log: Any, owner: int, tail: Ints, pair_hash: np.uint64, matched_positions: Ints, lengths: Ints) -> int:
    """Find a chain's latest positions whose preceding tokens match the end of ``tail``; return the number found.

    The positions are written to ``matched_positions``, and the match lengths to ``lengths``. At most twice as many
    positions are visited as ``matched_positions`` can hold. Positions of the answer ``owner`` are skipped.
    """
    entries, end, owners = entries_of(log), end_of(log), np.empty(0, np.int32)
    if log.owners:
        owners = owners_of(log)
    start, oldest = latest(log, pair_hash, end), max(np.int64(0), end - log.size)
    limits, max_matches = (CHAIN_KEY_TOKENS, MAX_MATCH_TOKENS), len(matched_positions)
    return follow_chain(
        entries[:, TOKEN],
        entries[:, PREVIOUS],
        owners,
        owner,
        start,
        oldest,
        tail,
        limits,
        max_matches,
        2 * max_matches,
        matched_positions,
        lengths,
        0,
    )


@numba.njit(inline="always")
def follow_chain(
    tokens: Ints,
    previous: Ints,
    owners: Ints,
    owner: int,
    start: Any,
    oldest: Any,
    tail: Ints,
    limits: tuple[int, int],
    max_matches: int,
    visits: int,
    matched_positions: Ints,
    lengths: Ints,
    count: int,
) -> int:
    """Follow a chain back from ``start``, and collect positions whose preceding tokens match the end of ``tail``.

    They are appended to ``matched_positions``, which already holds ``count`` positions, and the match lengths to
    ``lengths``; the new number of positions is returned. ``tokens`` holds the tokens of the ring, and ``previous`` each
    position's previous position on its chain. ``limits`` is ``(min_length, max_length)``: longer matches count towards
    ``max_matches``, but aren't added. The search stops after ``max_matches`` matches, after ``visits`` positions, or at
    ``oldest``. If blocks have ``owners``, blocks of ``NOBODY`` and of ``owner`` are skipped.
    """
    (min_length, max_length), mask, position, read = limits, len(tokens) - 1, np.int64(start), 0
    has_owners = len(owners) > 0
    for _ in range(visits):
        if position <= oldest or read == max_matches or count == len(matched_positions):
            break
        whose = owners[(position & mask) // LOG_BLOCK] if has_owners else 0
        if whose != NOBODY and (whose != owner or not has_owners):
            length, max_length_here = 0, min(np.int64(len(tail)), position - oldest)
            while length < max_length_here:
                token = tail[len(tail) - 1 - length]
                if token < 0 or tokens[(position - 1 - length) & mask] != token:
                    break
                length += 1
            if length >= min_length:
                read += 1
                if length <= max_length:
                    matched_positions[count], lengths[count] = position, length
                    count += 1
        earlier = np.int64(previous[position & mask])
        if earlier >= position:
            break  # the file is damaged, or being written by another process
        position = earlier
    return count


@compiled
def matches(memory: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """Find where the end of ``tail`` occurs in a log, latest first, and return ``(positions, lengths)``.

    A position is the one just after an occurrence, and its length the number of tokens that match before it.
    """
    matched_positions, lengths = np.empty(MAX_MATCHES, np.int64), np.empty(MAX_MATCHES, np.int64)
    if len(tail) < CHAIN_KEY_TOKENS:
        return matched_positions[:0], lengths[:0]
    pair_hash = np.uint64(sequence_hash(tail, len(tail) - CHAIN_KEY_TOKENS, CHAIN_KEY_TOKENS))
    count = search(memory[0], NOBODY, tail[-MAX_MATCH_TOKENS:], pair_hash, matched_positions, lengths)
    return matched_positions[:count], lengths[:count]
