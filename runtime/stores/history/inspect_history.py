"""What a history store holds, what it drafts after a context, and how long its look-ups take."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from hdtool.data.stores.history_manifest import FORMAT
from hdtool.data.stores.store_files import HISTORY
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.history.history_store import HistoryStore
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH, matches
from hdtool.runtime.stores.inspect_store import PATH, SHOWN, Found, latency


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


def history_continuations(store: HistoryStore, context: list[int]) -> Iterator[Found]:
    """What followed the longest matches of a context, most frequent first."""
    places, lengths = matches(store.log, np.array(context, np.int64))
    found: dict[tuple[int, ...], int] = {}
    for place in places[lengths == lengths.max(initial=0)].tolist():
        path = store.tokens(place, PATH)
        path = path[: int(np.argmax(path < 0))] if (path < 0).any() else path
        if len(path):
            found[tuple(path.tolist())] = found.get(tuple(path.tolist()), 0) + 1
    for each, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]:
        yield int(lengths.max()), list(each), count


def history_latency(store: HistoryStore) -> dict[str, float]:
    """Microseconds of a look-up at the root of a draft tree, after parts of the store's own conversations."""
    return latency(partial(matches, store.log), _parts(store))


def _parts(store: HistoryStore) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    while True:
        start = int(rng.integers(0, max(1, store.places - LONGEST_MATCH)))
        yield store.tokens(start, LONGEST_MATCH).astype(np.int64)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
