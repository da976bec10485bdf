"""What a store drafts after a context, and how long its lookups take."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from hdtool.runtime.stores.corpus_index import LONGEST_CONTEXT, CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore

SHOWN = 20
WARM_UP = 200
LOOKUPS = 4000


def continuations(store: CorpusIndex | ModelStore, context: list[int]) -> Iterator[tuple[int, list[int], int]]:
    """Length of the match, tokens and count of the most frequent whole paths after a context."""
    if not context:
        return
    if isinstance(store, ModelStore):
        for entry in store.after(context):
            for token, count in zip(entry.tokens[:SHOWN].tolist(), entry.counts[:SHOWN].tolist(), strict=True):
                yield entry.length, [token], count
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
    """Microseconds of a lookup, after a warm-up.

    Contexts are parts of the store's own documents with one token exchanged within the last eight, so
    that the longest match is as short as in text that the store does not hold.
    """
    documents = store.documents
    rng = np.random.default_rng(0)
    taken = []
    for number in range(LOOKUPS + WARM_UP):
        at = int(rng.integers(0, max(1, len(documents) - LONGEST_CONTEXT)))
        context = documents[at : at + LONGEST_CONTEXT].astype(np.int64)
        context[-min(int(rng.integers(2, 9)), len(context))] = rng.integers(store.manifest.tokenizer.vocab_size)
        started = time.perf_counter()
        store.after(context)
        if number >= WARM_UP:
            taken.append((time.perf_counter() - started) * 1e6)
    return {
        "lookup_us_p50": round(float(np.percentile(taken, 50)), 2),
        "lookup_us_p99": round(float(np.percentile(taken, 99)), 2),
    }
