"""What a history store holds, what it drafts after a context, and how long its look-ups take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.data.stores.history_manifest import FORMAT
from hdtool.data.stores.store_files import HISTORY
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.inspect_store import LOOKUPS, SHOWN, WARM_UP
from hdtool.runtime.stores.model_store import sequence_hash
from hdtool.runtime.stores.token_log import BEFORE, CHAINED, TOKEN, end_of, latest, places_of

LONGEST_MATCH = 32
PATH = 8
"""Tokens that are shown of what followed."""
READ = 64
"""Places of a chain that a look-up reads at most."""

Ints = npt.NDArray[Any]


def description(store: HistoryStore) -> dict[str, Any]:
    """A history store as ``inspect --json`` prints it."""
    manifest, held = store.manifest, store.conversations()
    names = sorted({each.source for each in held})
    tokens = sum(each.tokens for each in held)
    sources = []
    for name in names:
        own = [each for each in held if each.source == name]
        count = sum(each.tokens for each in own)
        times = [each.time for each in own]
        share = round(count / tokens, 4) if tokens else 0.0
        oldest, newest = _date(min(times)), _date(max(times))
        sources.append(
            {"name": name, "records": len(own), "tokens": count, "share": share, "oldest": oldest, "newest": newest}
        )
    return {
        "store": str(store.folder),
        "kind": HISTORY,
        "format": FORMAT,
        "tokenizer": manifest.tokenizer.fingerprint,
        "model": manifest.model,
        "vocab_size": manifest.tokenizer.vocab_size,
        "tokens": tokens,
        "entries": len(held),
        "bytes": store.nbytes,
        "options": {"most_bytes": manifest.most_bytes, "size": manifest.size},
        "sources": sources,
        "oldest": _date(min(each.time for each in held)) if held else None,
        "newest": _date(max(each.time for each in held)) if held else None,
    }


def history_continuations(store: HistoryStore, context: list[int]) -> Iterator[tuple[int, list[int], int]]:
    """Length of the match, tokens and count of what followed the longest matches of a context, most frequent first."""
    places, lengths = matches(store.log, np.array(context[-LONGEST_MATCH:], np.int64))
    found: dict[tuple[int, ...], int] = {}
    for place in places[lengths == lengths.max(initial=0)].tolist():
        path = store.tokens(place, PATH)
        path = path[: int(np.argmax(path < 0))] if (path < 0).any() else path
        if len(path):
            found[tuple(path.tolist())] = found.get(tuple(path.tolist()), 0) + 1
    for each, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]:
        yield int(lengths.max()), list(each), count


def history_latency(store: HistoryStore) -> dict[str, float]:
    """Microseconds of a look-up after parts of the store's own conversations, after a warm-up."""
    rng, taken = np.random.default_rng(0), []
    for number in range(LOOKUPS + WARM_UP):
        start = int(rng.integers(0, max(1, store.places - LONGEST_MATCH)))
        context = store.tokens(start, LONGEST_MATCH).astype(np.int64)
        started = time.perf_counter()
        matches(store.log, context)
        if number >= WARM_UP:
            taken.append((time.perf_counter() - started) * 1e6)
    return {
        "lookup_us_p50": round(float(np.percentile(taken, 50)), 2),
        "lookup_us_p99": round(float(np.percentile(taken, 99)), 2),
    }


@njit(cache=True, nogil=True)
def matches(memory: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """The latest places after which the last tokens of a context came before, and how many tokens match there."""
    log = memory[0]
    found, lengths, count = np.empty(READ, np.int64), np.zeros(READ, np.int64), 0
    if len(tail) < CHAINED:
        return found[:0], lengths[:0]
    places, mask, end = places_of(log), log.size - 1, end_of(log)
    oldest = max(np.int64(0), end - log.size)
    place = latest(log, sequence_hash(tail, len(tail) - CHAINED, CHAINED), end)
    for _ in range(READ):
        if place <= oldest:
            break
        length = 0
        while length < min(len(tail), place - oldest):
            token = tail[len(tail) - 1 - length]
            if token < 0 or places[(place - 1 - length) & mask, TOKEN] != token:
                break
            length += 1
        if length >= CHAINED:
            found[count], lengths[count] = place, length
            count += 1
        before = np.int64(places[place & mask, BEFORE])
        if before >= place:
            break
        place = before
    return found[:count], lengths[:count]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
