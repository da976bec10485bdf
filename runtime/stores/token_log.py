"""Token logs: ring buffers of tokens with hash chains, and the search for the latest matches of a context.

Each place holds a token and the previous place that follows the same two tokens. The places after a token pair thus
form a chain, latest first, as in LZ compressors. Concurrent answers are appended in separate blocks. Once the ring is
full, the oldest tokens are overwritten.

The drafter uses this search for the history and for predictions, and ``inspect`` shows and times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled
from hdtool.runtime.stores.model_store import mix_hash, sequence_hash

CHAIN_KEY_TOKENS = 2
"""Number of preceding tokens that the places of a chain share."""
LOG_BLOCK = 64
"""Number of places that an answer reserves at a time; a power of two."""
OVERLAP_TOKENS = 8
"""Number of preceding tokens copied to the start of an answer or non-adjacent block, so that matches can span it."""
INITIAL_LOG_PLACES, MAX_LOG_PLACES = 1 << 16, 1 << 20
"""Initial and default maximum number of places in a ring."""
MAX_LOG_PLACE_NUMBER = (1 << 31) - (1 << 24)
"""Place number after which a ring in memory is cleared, since place numbers have 32 bits."""
NO_TOKEN = -1
"""Marks empty places between answers."""
NOBODY = -1
"""Owner of blocks that are never matched."""
TOKEN, PREVIOUS = range(2)
MAX_STALE_PLACES = 64
"""Maximum number of places on a chain that a lookup skips because other processes appended them after ``end``."""

LOG = np.dtype(
    [
        ("end_at", np.int64),  # address of the end: the number of places ever reserved
        ("places", np.int64),  # address of the ring: a token and the previous place on its chain
        ("heads", np.int64),  # address of the latest place of each chain
        ("owners", np.int64),  # address of the owners of blocks, or 0
        ("size", np.int64),  # number of places in the ring, a power of two
        ("chains", np.int64),  # number of chains, a power of two
    ],
    align=True,
)
LANE = np.dtype(
    [
        ("owner", np.int64),  # number of the answer
        ("place", np.int64),  # place of its next token
        ("stop", np.int64),  # end of its current block
        ("first", np.int64),  # start of its first block
        ("before", np.int64),  # number of tokens before the answer, which are on no chain
    ],
    align=True,
)


class TokenLog(Uncopyable):
    """A token log in memory that grows up to ``max_places``, at 12 bytes per place."""

    def __init__(self, max_places: int = MAX_LOG_PLACES, size: int = INITIAL_LOG_PLACES) -> None:
        self.max_places = max_places
        self.memory = np.zeros(1, LOG)
        self._end = np.zeros(1, np.int64)
        self._answers = 0
        self._allocate(min(size, max_places))

    def __len__(self) -> int:
        """Return the number of places in use."""
        return min(int(self._end[0]), len(self._places))

    def lane(self) -> Ints:
        """Return a record that tracks the answer being appended; it can be reused for the next answer."""
        return np.zeros(1, LANE)

    def start(self, lane: Ints, tokens: Sequence[int] | Ints, *, learned: bool = False) -> None:
        """Begin an answer after ``tokens``, the last few of which are copied; if ``learned``, append and match all."""
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
        """Return the tokens before a lane's answer and those of the answer, unless they were overwritten."""
        tokens, before = answer_of(self.memory, lane)
        return tokens[:before], tokens[before:]

    def discard(self, owner: int) -> None:
        """Stop matching the blocks of an answer."""
        self._owners[self._owners == owner] = NOBODY

    def clear(self) -> None:
        self._end[0] = 0
        self._heads[:] = -1

    def _allocate(self, size: int) -> None:
        self._places = np.full((size, 2), NO_TOKEN, np.int32)
        self._heads = np.full(size, -1, np.int32)
        self._owners = np.full(size // LOG_BLOCK, NOBODY, np.int32)
        self.memory["end_at"], self.memory["size"], self.memory["chains"] = self._end.ctypes.data, size, size
        self.memory["places"], self.memory["heads"] = self._places.ctypes.data, self._heads.ctypes.data
        self.memory["owners"] = self._owners.ctypes.data

    def grow(self) -> None:
        """Double the ring if it is over half full, keeping place numbers; clear it if they would overflow."""
        size, end = len(self._places), int(self._end[0])
        if end > MAX_LOG_PLACE_NUMBER:
            self.clear()
            return
        if size >= self.max_places or 2 * end <= size:
            return
        places, owners = self._places, self._owners
        kept = np.arange(max(0, end - size), end)  # other lanes may have wrapped around since the last start
        while size < self.max_places and 2 * end > size:
            size *= 2
        self._allocate(size)
        self._places[kept & (size - 1)] = places[kept & (len(places) - 1)]
        kept = np.arange(kept[0] // LOG_BLOCK, end // LOG_BLOCK)
        self._owners[kept & (len(self._owners) - 1)] = owners[kept & (len(owners) - 1)]
        link_all(self.memory, end)


@compiled
def places_of(log: Any) -> Ints:
    return array_at(log.places, (log.size, 2), np.int32)


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
    """Return the chain of a token pair, taken from the high bits of its hash, which are mixed best."""
    return np.int64((pair_hash >> np.uint64(30)) & np.uint64(log.chains - 1))


@compiled
def latest(log: Any, pair_hash: np.uint64, end: Any) -> np.int64:
    """Return the latest place of a pair's chain below ``end``; -1 if none is found."""
    places, place = places_of(log), np.int64(heads_of(log)[chain_of(log, pair_hash)])
    for _ in range(MAX_STALE_PLACES):
        if place < end:
            return place
        place = np.int64(places[place & (log.size - 1), PREVIOUS])
    return np.int64(-1)


@compiled
def start(memory: Ints, lane: Ints, owner: int, tokens: Ints, unlinked: int) -> None:
    """Begin an answer by appending the tokens before it; the first ``unlinked`` of them are not linked to chains."""
    lane[0].owner, lane[0].place, lane[0].stop = owner, 0, 0
    lane[0].first, lane[0].before = 0, unlinked
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
        end[0] = -(-(lane[0].place + 1) // LOG_BLOCK) * LOG_BLOCK  # a block has a single owner
    lane[0].stop = lane[0].place = 0


@compiled
def answer_of(memory: Ints, lane: Ints) -> tuple[Ints, int]:
    """Return the tokens in an answer's blocks, without overlaps, and how many of them precede the answer."""
    log, lane_record = memory[0], lane[0]
    places, owners, mask, end = places_of(log), owners_of(log), log.size - 1, end_of(log)
    if lane_record.stop == 0:
        return np.empty(0, np.int32), 0
    oldest = max(lane_record.first, end - log.size)
    tokens, count = np.empty(end - oldest, np.int32), 0
    place = stop = np.int64(-1)
    for block in range(oldest, end, LOG_BLOCK):
        if owners[(block & mask) // LOG_BLOCK] != lane_record.owner:
            continue
        if stop != block:
            place = np.int64(block if stop < 0 else block + OVERLAP_TOKENS)
        stop = np.int64(block + LOG_BLOCK)
        while place < stop and places[place & mask, TOKEN] >= 0:
            tokens[count] = places[place & mask, TOKEN]
            count += 1
            place += 1
    before = lane_record.before if oldest == lane_record.first else OVERLAP_TOKENS
    return tokens[:count], min(before, count)


@compiled
def append(log: Any, lane: Any, token: Any, linked: bool) -> None:
    """Append a token to a lane's answer; if ``linked``, also to its chain."""
    if lane.place + 1 >= lane.stop or lane.stop - LOG_BLOCK < end_of(log) - log.size:
        _reserve(log, lane)
    places, place = places_of(log), lane.place
    if linked:
        link(log, place)
    places[place & (log.size - 1), TOKEN] = token
    lane.place = place + 1


@compiled
def _reserve(log: Any, lane: Any) -> None:
    """Reserve the next block of a lane, and copy the overlap unless it is adjacent to the previous one.

    The last place of a block is only used if the next block is adjacent.
    """
    places, owners, end = places_of(log), owners_of(log), array_at(log.end_at, 1, np.int64)
    mask, first = log.size - 1, end[0]
    for place in range(first, first + LOG_BLOCK):
        places[place & mask, TOKEN], places[place & mask, PREVIOUS] = NO_TOKEN, -1
    owners[(first & mask) // LOG_BLOCK] = lane.owner
    end[0] = first + LOG_BLOCK
    before, had, lane.place, lane.stop = lane.place, lane.stop, first, first + LOG_BLOCK
    if had == 0:
        lane.first = first
        return
    if had == first:
        lane.place = before
        return
    kept = max(before - OVERLAP_TOKENS, had - LOG_BLOCK, end[0] - log.size)
    for place in range(kept, before):
        places[lane.place & mask, TOKEN] = places[place & mask, TOKEN]
        lane.place += 1


@compiled
def link(log: Any, place: Any) -> None:
    """Link a place to the chain of the two tokens before it, if both exist."""
    places, mask = places_of(log), log.size - 1
    pair_hash = np.uint64(0)
    for length in range(1, CHAIN_KEY_TOKENS + 1):
        token = places[(place - length) & mask, TOKEN] if place >= length else np.int32(NO_TOKEN)
        if token < 0:
            return
        pair_hash = mix_hash(pair_hash, token)
    places[place & mask, PREVIOUS] = latest(log, pair_hash, place)
    heads_of(log)[chain_of(log, pair_hash)] = place


@compiled
def link_all(memory: Ints, end: int) -> None:
    """Build the chains of a ring from its tokens."""
    log = memory[0]
    places, mask = places_of(log), log.size - 1
    for place in range(max(0, end - log.size), end):
        places[place & mask, PREVIOUS] = -1
        if places[place & mask, TOKEN] >= 0:
            link(log, place)


MAX_MATCH_TOKENS = 32
"""Maximum match length in tokens."""
MAX_MATCHES = 32
"""Maximum number of places found for a context."""


@compiled
def search(log: Any, owner: int, tail: Ints, pair_hash: np.uint64, matched_places: Ints, lengths: Ints) -> int:
    """Write the latest places of a chain that match the end of ``tail``, and their match lengths; return their number.

    At most twice as many places are visited as ``matched_places`` can hold. Places of the answer ``owner`` are skipped.
    """
    places, end, owners = places_of(log), end_of(log), np.empty(0, np.int32)
    if log.owners:
        owners = owners_of(log)
    start, oldest = latest(log, pair_hash, end), max(np.int64(0), end - log.size)
    limits, max_matches = (CHAIN_KEY_TOKENS, MAX_MATCH_TOKENS), len(matched_places)
    return follow_chain(
        places[:, TOKEN],
        places[:, PREVIOUS],
        owners,
        owner,
        start,
        oldest,
        tail,
        limits,
        max_matches,
        2 * max_matches,
        matched_places,
        lengths,
        0,
    )


@numba.njit(inline="always")
def follow_chain(
    tokens: Ints,
    before: Ints,
    owners: Ints,
    owner: int,
    start: Any,
    oldest: Any,
    tail: Ints,
    limits: tuple[int, int],
    max_matches: int,
    visits: int,
    matched_places: Ints,
    lengths: Ints,
    count: int,
) -> int:
    """Follow a chain back from ``start`` and append places that match the end of ``tail`` to the first ``count`` ones.

    ``tokens`` is the ring and ``before`` the previous place on each place's chain. ``limits`` are the minimum match
    length, and the maximum: longer matches count, but aren't appended. The search stops after ``max_matches`` matches,
    after ``visits`` places, or at ``oldest``. If blocks have ``owners``, those of ``NOBODY`` and of ``owner`` are
    skipped. Returns the new number of places.
    """
    (min_length, longest), mask, place, read = limits, len(tokens) - 1, np.int64(start), 0
    has_owners = len(owners) > 0
    for _ in range(visits):
        if place <= oldest or read == max_matches or count == len(matched_places):
            break
        whose = owners[(place & mask) // LOG_BLOCK] if has_owners else 0
        if whose != NOBODY and (whose != owner or not has_owners):
            length, longest_here = 0, min(np.int64(len(tail)), place - oldest)
            while length < longest_here:
                token = tail[len(tail) - 1 - length]
                if token < 0 or tokens[(place - 1 - length) & mask] != token:
                    break
                length += 1
            if length >= min_length:
                read += 1
                if length <= longest:
                    matched_places[count], lengths[count] = place, length
                    count += 1
        earlier = np.int64(before[place & mask])
        if earlier >= place:
            break  # the file is damaged, or being written by another process
        place = earlier
    return count


@compiled
def matches(memory: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """Return the places of tokens that followed the end of a context before, and the match lengths."""
    matched_places, lengths = np.empty(MAX_MATCHES, np.int64), np.empty(MAX_MATCHES, np.int64)
    if len(tail) < CHAIN_KEY_TOKENS:
        return matched_places[:0], lengths[:0]
    pair_hash = np.uint64(sequence_hash(tail, len(tail) - CHAIN_KEY_TOKENS, CHAIN_KEY_TOKENS))
    count = search(memory[0], NOBODY, tail[-MAX_MATCH_TOKENS:], pair_hash, matched_places, lengths)
    return matched_places[:count], lengths[:count]
