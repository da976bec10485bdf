"""Token logs: rings of tokens with hash chains, and the search for the latest matches of a context.

Each place holds a token and the previous place that follows the same two tokens, so the places after a pair form a
chain, latest first, as in LZ compressors. Several answers are appended at once, each in its own blocks; once the ring
is full, the oldest tokens are overwritten.

The drafter searches the history and predictions with it, and ``inspect`` shows and times this search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled
from hdtool.runtime.stores.model_store import mix_hash, sequence_hash

CHAIN_KEY_TOKENS = 2
"""How many last tokens the places of a chain follow."""
LOG_BLOCK = 64
"""Places that an answer reserves at once; a power of two."""
OVERLAP_TOKENS = 8
"""Tokens before an answer, or before a block elsewhere, that are copied so that matches do not begin at its start."""
INITIAL_LOG_PLACES, MAX_LOG_PLACES = 1 << 16, 1 << 20
"""Places of a ring when it is created, and after it has grown."""
MAX_LOG_PLACE_NUMBER = (1 << 31) - (1 << 24)
"""Numbers of places have 32 bits: after so many tokens, a ring in memory begins anew."""
NO_TOKEN = -1
"""Between answers."""
NOBODY = -1
"""The owner of blocks that are never matched."""
TOKEN, PREVIOUS = range(2)
MAX_STALE_PLACES = 64
"""Places in a row, of tokens that other processes appended since ``end`` was read, that a look-up skips."""

LOG = np.dtype(
    [
        ("end_at", np.int64),  # address of the number of places ever reserved
        ("places", np.int64),  # address of the ring: a token, and the place before it on its chain
        ("heads", np.int64),  # address of the latest place of each chain, by hash
        ("owners", np.int64),  # address of the answer that each block belongs to, or 0
        ("size", np.int64),  # places in the ring, a power of two
        ("chains", np.int64),  # a power of two
    ],
    align=True,
)
LANE = np.dtype(
    [
        ("owner", np.int64),  # the answer that is appended
        ("place", np.int64),  # of its next token
        ("stop", np.int64),  # of its block
        ("first", np.int64),  # place of its first block
        ("before", np.int64),  # tokens before the answer, which are on no chain
    ],
    align=True,
)


class TokenLog(Uncopyable):
    """A ring in memory, which grows up to ``most`` places; 12 bytes for each."""

    def __init__(self, max_places: int = MAX_LOG_PLACES, size: int = INITIAL_LOG_PLACES) -> None:
        self.max_places = max_places
        self.memory = np.zeros(1, LOG)
        self._end = np.zeros(1, np.int64)
        self._answers = 0
        self._allocate(min(size, max_places))

    def __len__(self) -> int:
        """Places in use."""
        return min(int(self._end[0]), len(self._places))

    def lane(self) -> Ints:
        """A record with which one answer after another is appended."""
        return np.zeros(1, LANE)

    def start(self, lane: Ints, tokens: Sequence[int] | Ints, *, learned: bool = False) -> None:
        """Begin an answer after these tokens, of which the last few are copied; if ``learned``, all are appended."""
        self.grow()
        self._answers += 1
        ids = np.asarray(tokens if learned else tokens[-OVERLAP_TOKENS:], np.int64)
        start(self.memory, lane, self._answers, ids, min(CHAIN_KEY_TOKENS, len(ids)) if learned else len(ids))

    def append(self, lane: Ints, tokens: Sequence[int] | Ints) -> None:
        append_all(self.memory, lane, np.asarray(tokens, np.int64))

    def finish(self, lane: Ints) -> None:
        """End an answer; what is left of its block is given back if nothing was reserved after it."""
        finish(self.memory, lane)

    def answer(self, lane: Ints) -> tuple[Ints, Ints]:
        """The tokens before the answer of a lane, and its own, as far as they are kept."""
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
        """Double the ring once it is half full; places keep their numbers."""
        size, end = len(self._places), int(self._end[0])
        if end > MAX_LOG_PLACE_NUMBER:
            self.clear()
            return
        if size >= self.max_places or 2 * end <= size:
            return
        places, owners = self._places, self._owners
        kept = np.arange(max(0, end - size), end)  # others may have appended more than half a ring since the last start
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
    """Which chain a pair of tokens has; the high bits of a hash are the well mixed ones."""
    return np.int64((pair_hash >> np.uint64(30)) & np.uint64(log.chains - 1))


@compiled
def latest(log: Any, pair_hash: np.uint64, end: Any) -> np.int64:
    """The latest place of a chain below ``end``."""
    places, place = places_of(log), np.int64(heads_of(log)[chain_of(log, pair_hash)])
    for _ in range(MAX_STALE_PLACES):
        if place < end:
            return place
        place = np.int64(places[place & (log.size - 1), PREVIOUS])
    return np.int64(-1)


@compiled
def start(memory: Ints, lane: Ints, owner: int, tokens: Ints, unlinked: int) -> None:
    """Reserve a block for an answer and append the tokens before it; the first ``unlinked`` ones are on no chain."""
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
        end[0] = -(-(lane[0].place + 1) // LOG_BLOCK) * LOG_BLOCK  # owners are kept by whole blocks
    lane[0].stop = lane[0].place = 0


@compiled
def answer_of(memory: Ints, lane: Ints) -> tuple[Ints, int]:
    """The tokens in the blocks of an answer, without copies, and how many of them are before it."""
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
    """Append a token to the answer of a lane."""
    if lane.place + 1 >= lane.stop or lane.stop - LOG_BLOCK < end_of(log) - log.size:
        _reserve(log, lane)
    places, place = places_of(log), lane.place
    if linked:
        link(log, place)
    places[place & (log.size - 1), TOKEN] = token
    lane.place = place + 1


@compiled
def _reserve(log: Any, lane: Any) -> None:
    """Reserve the next block; the last place of a block stays empty unless the next one continues it."""
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
    """Put a place on the chain of the two tokens before it, if they are there."""
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
    """Build the chains of a ring whose tokens are there already."""
    log = memory[0]
    places, mask = places_of(log), log.size - 1
    for place in range(max(0, end - log.size), end):
        places[place & mask, PREVIOUS] = -1
        if places[place & mask, TOKEN] >= 0:
            link(log, place)


MAX_MATCH_TOKENS = 32
"""Tokens that a place is compared with."""
MAX_MATCHES = 32
"""Places that are found at most after a context."""


@compiled
def search(log: Any, owner: int, tail: Ints, pair_hash: np.uint64, matched_places: Ints, lengths: Ints) -> int:
    """Fill in the latest places of a chain that match ``tail``, and how many tokens match; return how many there are.

    Twice as many places are visited at most. Those of the answer ``owner`` are skipped.
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
    """Follow a chain of places back from ``start``, and add those that match the end of ``tail`` to ``count`` others.

    ``tokens`` is a ring, and ``before`` has the place before each on its chain. ``limits`` are the fewest tokens that
    match, and how many do at most of a place that is added. At most so many places match and are visited. Where blocks
    have ``owners``, those of nobody and of ``owner`` are skipped. Returns the number of all places.
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
            break  # of a damaged file, or of one that another process writes
        place = earlier
    return count


@compiled
def matches(memory: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """The places that a draft after this context begins with, and how many tokens match there."""
    matched_places, lengths = np.empty(MAX_MATCHES, np.int64), np.empty(MAX_MATCHES, np.int64)
    if len(tail) < CHAIN_KEY_TOKENS:
        return matched_places[:0], lengths[:0]
    pair_hash = np.uint64(sequence_hash(tail, len(tail) - CHAIN_KEY_TOKENS, CHAIN_KEY_TOKENS))
    count = search(memory[0], NOBODY, tail[-MAX_MATCH_TOKENS:], pair_hash, matched_places, lengths)
    return matched_places[:count], lengths[:count]
