"""The look-up in a token log: the latest places after the last tokens of a context.

The drafter searches the history and predictions with it, and ``inspect`` shows and times the same search.
"""

from __future__ import annotations

from typing import Any

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
    places, mask, end = places_of(log), log.size - 1, end_of(log)
    oldest, count = max(np.int64(0), end - log.size), 0
    place = latest(log, pair_hash, end)
    for _ in range(2 * len(found)):
        if place <= oldest or count == len(found):
            break
        at = place & mask
        if log.owners == 0 or (owners_of(log)[at // BLOCK] != NOBODY and owners_of(log)[at // BLOCK] != owner):
            length, most = 0, min(len(tail), place - oldest)
            while length < most:
                token = tail[len(tail) - 1 - length]
                if token < 0 or places[(place - 1 - length) & mask, TOKEN] != token:
                    break
                length += 1
            if length >= CHAINED:
                found[count], lengths[count] = place, length
                count += 1
        before = np.int64(places[at, BEFORE])
        if before >= place:
            break  # of a damaged file, or of one that another process writes
        place = before
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
