"""The look-up in a token log: the latest places after the last tokens of a context.

The drafter searches the history and predictions with it, and ``inspect`` shows and times the same search.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.history.token_log import (
    BEFORE,
    BLOCK,
    CHAINED,
    NOBODY,
    TOKEN,
    end_of,
    latest,
    owners_of,
    places_of,
)
from hdtool.runtime.stores.model_store import sequence_hash

LONGEST_MATCH = 32
"""Tokens that a place is compared with."""
MATCHES = 32
"""Places that are found at most after a context."""


@compiled
def search(log: Any, owner: int, tail: Ints, pair_hash: np.uint64, found: Ints, lengths: Ints) -> int:
    """Fill in the latest places of a chain that match ``tail``, and how many tokens match; return how many there are.

    Twice as many places are visited at most. Those of the answer ``owner`` are skipped.
    """
    places, end, owners = places_of(log), end_of(log), np.empty(0, np.int32)
    if log.owners:
        owners = owners_of(log)
    start, oldest = latest(log, pair_hash, end), max(np.int64(0), end - log.size)
    limits, most = (CHAINED, LONGEST_MATCH), len(found)
    return follow_chain(
        places[:, TOKEN],
        places[:, BEFORE],
        owners,
        owner,
        start,
        oldest,
        tail,
        limits,
        most,
        2 * most,
        found,
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
    most: int,
    visits: int,
    found: Ints,
    lengths: Ints,
    count: int,
) -> int:
    """Follow a chain of places back from ``start``, and add those that match the end of ``tail`` to ``count`` others.

    ``tokens`` is a ring, and ``before`` has the place before each on its chain. ``limits`` are the fewest tokens that
    match, and how many do at most of a place that is added. At most so many places match and are visited. Where blocks
    have ``owners``, those of nobody and of ``owner`` are skipped. Returns the number of all places.
    """
    (least, longest), mask, place, read = limits, len(tokens) - 1, np.int64(start), 0
    has_owners = len(owners) > 0
    for _ in range(visits):
        if place <= oldest or read == most or count == len(found):
            break
        whose = owners[(place & mask) // BLOCK] if has_owners else 0
        if whose != NOBODY and (whose != owner or not has_owners):
            length, longest_here = 0, min(np.int64(len(tail)), place - oldest)
            while length < longest_here:
                token = tail[len(tail) - 1 - length]
                if token < 0 or tokens[(place - 1 - length) & mask] != token:
                    break
                length += 1
            if length >= least:
                read += 1
                if length <= longest:
                    found[count], lengths[count] = place, length
                    count += 1
        earlier = np.int64(before[place & mask])
        if earlier >= place:
            break  # of a damaged file, or of one that another process writes
        place = earlier
    return count


@compiled
def matches(memory: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """The places that a draft after this context begins with, and how many tokens match there."""
    found, lengths = np.empty(MATCHES, np.int64), np.empty(MATCHES, np.int64)
    if len(tail) < CHAINED:
        return found[:0], lengths[:0]
    pair_hash = np.uint64(sequence_hash(tail, len(tail) - CHAINED, CHAINED))
    count = search(memory[0], NOBODY, tail[-LONGEST_MATCH:], pair_hash, found, lengths)
    return found[:count], lengths[:count]
