"""What the hierarchy drafts from a store after a context, and how long its look-ups take.

All of it calls the compiled functions that the drafter calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.corpus_ranges import LONGEST_RANGE, CorpusSearch
from hdtool.runtime.stores.model_record import ModelRecord
from hdtool.runtime.stores.model_store import LONGEST_PREFIX, ModelStore, look_up

SHOWN = 20
PATH = 8
"""Tokens that are shown at most of what follows."""
WARM_UP = 200
LOOKUPS = 4000
CONTEXT = 16

Found = tuple[int, list[int], int]
"""Length of the match, tokens that follow and how often."""


def continuations(store: CorpusIndex | ModelStore, context: list[int]) -> Iterator[Found]:
    """The most frequent continuations of a context, those of the longest match first."""
    return _of_model(store, context) if isinstance(store, ModelStore) else _of_corpus(store, context)


def _of_model(store: ModelStore, context: list[int]) -> Iterator[Found]:
    for entry in store.after(context):
        for token, count in zip(entry.tokens[:SHOWN].tolist(), entry.counts[:SHOWN].tolist(), strict=True):
            yield entry.length, [token], count
    for phrase, count in zip(*store.phrases_after(context[-1] if context else -1, SHOWN), strict=True):
        yield 1, phrase.tolist(), int(count)


def _of_corpus(index: CorpusIndex, context: list[int]) -> Iterator[Found]:
    search = CorpusSearch(index.shards)
    search.read(context)
    for order in range(min(LONGEST_RANGE, len(context)), 0, -1):
        _, counts = search.followers(order)
        if counts:
            for token, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]:
                yield order, _path(index, [*context[-order:], token], order, count), count
            return


def _path(index: CorpusIndex, tokens: list[int], matched: int, count: int) -> list[int]:
    """The token after a match, and those after it for as long as all places of the match have the same."""
    search = CorpusSearch(index.shards)
    while len(tokens) < matched + PATH:
        search.read(tokens)
        found, counts = search.followers(min(LONGEST_RANGE, len(tokens)))
        if found != count or list(counts.values()) != [count]:
            break
        tokens += counts
    return tokens[matched:]


def latency_of(store: CorpusIndex | ModelStore) -> dict[str, float]:
    """Microseconds of a look-up at one node of a draft tree, of all lengths of context.

    Contexts are parts of the store's own documents with one token exchanged within the last eight, so
    that the longest match is as short as in text that the store does not hold.
    """
    vocabulary = store.manifest.tokenizer.vocab_size
    if isinstance(store, ModelStore):
        text = ModelRecord.of(store.folder, store.manifest).text()
        tails = (tail[-LONGEST_PREFIX:] for tail in _exchanged(text, vocabulary))
        return latency(partial(look_up, store.record), tails)
    search = CorpusSearch(store.shards)

    def moved() -> Iterator[Ints]:
        for context in _exchanged(store.documents, vocabulary):
            search.read(context[:-1])  # the ranges of the parent are known
            yield context

    return latency(search.look_up, moved())


def _exchanged(documents: Ints, vocabulary: int) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    while True:
        at = int(rng.integers(0, max(1, len(documents) - CONTEXT)))
        context = documents[at : at + CONTEXT].astype(np.int64)
        context[-min(int(rng.integers(2, 9)), len(context))] = rng.integers(vocabulary)
        yield context


def latency(look_up: Callable[[Ints], object], contexts: Iterator[Ints]) -> dict[str, float]:
    """Microseconds of a look-up after each of these contexts, after a warm-up."""
    taken = []
    for context in islice(contexts, WARM_UP + LOOKUPS):
        started = time.perf_counter()
        look_up(context)
        taken.append((time.perf_counter() - started) * 1e6)
    median, high = np.percentile(taken[WARM_UP:], (50, 99))
    return {"lookup_us_p50": round(float(median), 2), "lookup_us_p99": round(float(high), 2)}
