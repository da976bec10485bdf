"""Describes a store or a history: its contents, the continuations it has for a context, and its lookup latency.

The lookups are the compiled ones that drafters use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from hdtool.data.stores.kinds import HISTORY, HISTORY_KIND
from hdtool.runtime.core.tree import ROOT
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.corpus_index import CONTINUATION_DEPTH, MATCH_SAMPLES, Continuations, CorpusIndex
from hdtool.runtime.stores.history_metadata import StoredConversation
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.model_store import ModelStore, look_up
from hdtool.runtime.stores.model_store_lmdb import MAX_PREFIX_TOKENS, ModelRecord
from hdtool.runtime.stores.suffix_ranges import (
    MAX_RANGE_ORDER,
    MAX_SAMPLES,
    narrow,
    range_record,
    read_samples,
    size_of,
)
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS, matches

MAX_SHOWN = 20
MAX_PATH = 8
"""Maximum number of tokens shown per continuation."""
MAX_FOUND = MATCH_SAMPLES * CONTINUATION_DEPTH
"""Maximum number of nodes in a tree of continuations, enough for all that a lookup reads."""
WARM_UP_LOOKUPS = 200
TIMED_LOOKUPS = 4000
CONTEXT_LENGTH = 16

FoundContinuation = tuple[int, list[int], int]
"""``(length, tokens, count)``: the length of a match, tokens that followed it, and how often they followed."""


def continuations(store: CorpusIndex | ModelStore | HistoryStore, context: list[int]) -> Iterator[FoundContinuation]:
    """Yield the most frequent continuations of a context, those of the longest match first."""
    if isinstance(store, HistoryStore):
        return _of_history(store, context)
    return _of_model(store, context) if isinstance(store, ModelStore) else _of_corpus(store, context)


def _of_model(store: ModelStore, context: list[int]) -> Iterator[FoundContinuation]:
    for entry in store.after(context):
        for token, count in zip(entry.tokens[:MAX_SHOWN].tolist(), entry.counts[:MAX_SHOWN].tolist(), strict=True):
            yield entry.length, [token], count
    for phrase, count in zip(*store.phrases_after(context[-1] if context else -1, MAX_SHOWN), strict=True):
        yield 1, phrase.tolist(), int(count)


def _of_corpus(index: CorpusIndex, context: list[int]) -> Iterator[FoundContinuation]:
    for length in range(min(MAX_RANGE_ORDER, len(context)), 0, -1):
        found = index.after(context[-length:], MAX_FOUND)
        if len(found.tokens):
            counts = found.counts.tolist()
            first: list[int] = np.flatnonzero(found.parents == ROOT).tolist()
            shown = sorted(first, key=lambda node: (-counts[node], found.tokens[node]))
            for node in shown[:MAX_SHOWN]:
                yield found.matched, _path(found, node), counts[node]
            return


def _path(found: Continuations, node: int) -> list[int]:
    """Return the tokens on the path to a node, extended as long as all of its occurrences continue alike."""
    path, count = [int(found.tokens[node])], found.counts[node]
    while len(path) < MAX_PATH:
        (children,) = np.nonzero((found.parents == node) & (found.counts == count))
        if not len(children):
            break
        node = int(children[0])
        path.append(int(found.tokens[node]))
    return path


def latency_of(store: CorpusIndex | ModelStore | HistoryStore) -> dict[str, float]:
    """Measure the latency of a draft node's lookup, which covers all match lengths; see ``_latency`` for the result.

    Contexts are parts of the store's documents with one of the second-last to eighth-last tokens replaced at random, so
    that matches are as short as in unseen text. In a history, they are parts of the store's conversations.
    """
    if isinstance(store, HistoryStore):
        return _latency(partial(matches, store.log), _parts(store))
    vocabulary = store.manifest.tokenizer.vocab_size
    if isinstance(store, ModelStore):
        text = ModelRecord.of(store.folder, store.manifest).text()
        tails = (tail[-MAX_PREFIX_TOKENS:] for tail in _perturbed_contexts(text, vocabulary))
        return _latency(partial(look_up, store.record), tails)
    record, bounds = range_record(store.shards)

    def moved() -> Iterator[Ints]:
        for context in _perturbed_contexts(store.documents, vocabulary):
            bounds[0], record["read"][0] = 0, 0
            for stop in range(len(context) - MAX_RANGE_ORDER + 1, len(context)):  # a drafter has the parent's ranges
                extend_match(store.tokens, record, context[:stop])
            yield context

    return _latency(partial(extend_match, store.tokens, record), moved())


@compiled
def extend_match(corpus: Ints, record: Ints, tail: Ints) -> None:
    """Extend the matches of a tree's root by the last token of ``tail``, and read the tokens after the new matches."""
    ranges = record[0]
    for order in range(MAX_RANGE_ORDER, 0, -1):
        narrow(corpus, ranges, tail, 0, 0, order)
    for order in range(MAX_RANGE_ORDER, 0, -1):
        found = size_of(ranges, 0, order)
        if found > 0:
            read_samples(corpus, ranges, 0, order, found, MAX_SAMPLES)


def _perturbed_contexts(documents: Ints, vocabulary: int) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    while True:
        at = int(rng.integers(0, max(1, len(documents) - CONTEXT_LENGTH)))
        context = documents[at : at + CONTEXT_LENGTH].astype(np.int64)
        context[-min(int(rng.integers(2, 9)), len(context))] = rng.integers(vocabulary)
        yield context


def _latency(look_up: Callable[[Ints], object], contexts: Iterator[Ints]) -> dict[str, float]:
    """Time a lookup for each context, after a warm-up; return the median and 99th percentile in microseconds."""
    taken = []
    for context in islice(contexts, WARM_UP_LOOKUPS + TIMED_LOOKUPS):
        started = time.perf_counter()
        look_up(context)
        taken.append((time.perf_counter() - started) * 1e6)
    median, high = np.percentile(taken[WARM_UP_LOOKUPS:], (50, 99))
    return {"lookup_us_p50": round(float(median), 2), "lookup_us_p99": round(float(high), 2)}


def description(store: HistoryStore) -> dict[str, Any]:
    """Describe a history store, in the form that ``inspect --json`` prints."""
    manifest, held = store.manifest, store.conversations()
    tokens = sum(each.tokens for each in held)
    return {
        "store": str(store.folder),
        "kind": HISTORY_KIND,
        "format": HISTORY.format,
        "tokenizer": manifest.tokenizer.fingerprint,
        "model": manifest.model,
        "vocab_size": manifest.tokenizer.vocab_size,
        "tokens": tokens,
        "entries": len(held),
        "bytes": store.nbytes,
        "options": {"most_bytes": manifest.max_bytes, "size": manifest.size},
        "sources": [
            _source(name, [each for each in held if each.source == name], tokens)
            for name in sorted({each.source for each in held})
        ],
        **_ages(held),
    }


def _source(name: str, held: Sequence[StoredConversation], tokens: int) -> dict[str, Any]:
    count = sum(each.tokens for each in held)
    share = round(count / tokens, 4) if tokens else 0.0
    return {"name": name, "records": len(held), "tokens": count, "share": share, **_ages(held)}


def _ages(held: Sequence[StoredConversation]) -> dict[str, str | None]:
    times = [each.time for each in held]
    oldest, newest = (
        datetime.fromtimestamp(choose(times), UTC).isoformat(timespec="seconds") if times else None
        for choose in (min, max)
    )
    return {"oldest": oldest, "newest": newest}


def _of_history(store: HistoryStore, context: list[int]) -> Iterator[FoundContinuation]:
    positions, lengths = matches(store.log, np.array(context, np.int64))
    counts_by_path: dict[tuple[int, ...], int] = {}
    for position in positions[lengths == lengths.max(initial=0)].tolist():
        path = store.tokens(position, MAX_PATH)
        path = path[: int(np.argmax(path < 0))] if (path < 0).any() else path
        if len(path):
            counts_by_path[tuple(path.tolist())] = counts_by_path.get(tuple(path.tolist()), 0) + 1
    for each, count in sorted(counts_by_path.items(), key=lambda item: (-item[1], item[0]))[:MAX_SHOWN]:
        yield int(lengths.max()), list(each), count


def _parts(store: HistoryStore) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    while True:
        start = int(rng.integers(0, max(1, store.num_positions - MAX_MATCH_TOKENS)))
        yield store.tokens(start, MAX_MATCH_TOKENS).astype(np.int64)
