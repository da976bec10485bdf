"""Stores of either kind: opened, looked into and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hdtool.data.stores.store import Manifest
from hdtool.runtime.stores.corpus_index import KIND as CORPUS
from hdtool.runtime.stores.corpus_index import LONGEST_CONTEXT, CorpusIndex
from hdtool.runtime.stores.mapped_file import documents_of
from hdtool.runtime.stores.model_store import ModelStore

__all__ = ["continuations", "documents_of", "latency_of", "open_store"]

SHOWN = 20
LOOK_UPS = 4000


def open_store(folder: Path, manifest: Manifest) -> CorpusIndex | ModelStore:
    """The store with this manifest, of whichever kind."""
    return (CorpusIndex if manifest.kind == CORPUS else ModelStore).of(folder, manifest)


def continuations(store: CorpusIndex | ModelStore, context: list[int]) -> Iterator[tuple[int, list[int], int]]:
    """What a store would draft: length of the match, tokens, count; the commonest whole paths."""
    if not context:
        return
    if isinstance(store, ModelStore):
        levels = store.after(context, SHOWN)
        for length, start, stop in zip(levels.lengths, levels.starts, levels.stops, strict=True):
            for row in range(start, stop):
                yield int(length), [int(levels.tokens[row])], int(levels.counts[row])
        for phrase, count in zip(*store.phrases_after(context[-1], SHOWN), strict=True):
            yield 1, phrase.tolist(), int(count)
        return
    found = store.after(context)
    parents = found.parents.tolist()
    for leaf in sorted(set(range(len(parents))) - set(parents))[:SHOWN]:
        path, node = [], leaf
        while node >= 0:
            path.append(int(found.tokens[node]))
            node = parents[node]
        yield found.matched, path[::-1], int(found.counts[leaf])


def latency_of(store: CorpusIndex | ModelStore) -> dict[str, float]:
    """Microseconds a look-up takes, the first ones left out.

    Contexts are stretches of the store's own documents with one token exchanged within the last
    eight, so that the longest match is as short as it is on text that the store has never seen.
    """
    documents = store.documents
    rng = np.random.default_rng(0)
    taken = []
    for number in range(LOOK_UPS + 200):
        at = int(rng.integers(0, max(1, len(documents) - LONGEST_CONTEXT)))
        context = documents[at : at + LONGEST_CONTEXT].astype(np.int64)
        context[-min(int(rng.integers(2, 9)), len(context))] = rng.integers(store.manifest.tokenizer.vocab_size)
        started = time.perf_counter()
        store.after(context)
        if number >= 200:
            taken.append((time.perf_counter() - started) * 1e6)
    return {
        "lookup_us_p50": round(float(np.percentile(taken, 50)), 2),
        "lookup_us_p99": round(float(np.percentile(taken, 99)), 2),
    }
