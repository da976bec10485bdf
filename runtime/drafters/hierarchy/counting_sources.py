"""Sources that give tokens with counts or shares: the model store, the corpus index, plug-ins and trained drafters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.compiled_source import (
    RESTART,
    CompiledSource,
    Prior,
    record_array_at,
    record_at,
    work_at,
)
from hdtool.runtime.drafters.hierarchy.token_probabilities import contribute, evidence_bucket, share_bucket, spread_of
from hdtool.runtime.drafters.trained.proposal import MAX_RANKINGS, NO_RANKING_AFTER, TOKENS_PER_RANKING, Proposal
from hdtool.runtime.kernels.compiled import Array, array_at, compiled, lap
from hdtool.runtime.settings.building import MAX_HEADS
from hdtool.runtime.settings.draft_sources import PLUGINS, Evidence, SourceId
from hdtool.runtime.stores.model_store import MODEL_RECORD, lookup_hash, prefetch_entries, rows_of
from hdtool.runtime.stores.model_store_lmdb import MAX_PREFIX_TOKENS
from hdtool.runtime.stores.suffix_ranges import (
    MAX_RANGE_ORDER,
    MAX_SAMPLES,
    MIN_SAMPLES,
    RANGE_ROWS,
    RANGES,
    bounds_of,
    count_followers,
    narrow,
    read_samples,
    size_of,
)

CORPUS_SEARCH_FACTOR = 5.0
"""The corpus index, the slowest source, is searched only while at least this multiple of ``min_left`` is left."""
BEFORE_ORDER = 3
"""N-gram order at which trained drafters and plug-ins contribute, ahead of the other sources."""
MILLION = 1_000_000
"""Integer that stands for a share of 1: predicted shares are stored in millionths."""
MAX_PLUGINS = len(PLUGINS)
MAX_PLUGIN_POSITIONS = MAX_HEADS
"""Maximum number of positions after the root that a plug-in predicts."""
MAX_PREDICTED_TOKENS = 60
"""Maximum number of tokens kept for each position, the most probable ones."""
ANY_TOKEN, NO_CHAIN_TOKEN = -1, -2
MODEL_NUMBER, CORPUS_NUMBER = SourceId.MODEL.value, SourceId.CORPUS.value

PREDICTION_RECORD = np.dtype(
    [
        ("source", np.int64),
        ("count", np.int64),  # number of predicted positions; 0 without evidence
        ("ahead", np.int64),  # number of tokens emitted since the prediction
        # The token of each position on which the predictions for later positions depend, or ANY_TOKEN.
        ("chain", np.int64, MAX_PLUGIN_POSITIONS),
        ("tokens", np.int64, (MAX_PLUGIN_POSITIONS, MAX_PREDICTED_TOKENS)),  # most probable first
        ("shares", np.int64, (MAX_PLUGIN_POSITIONS, MAX_PREDICTED_TOKENS)),
    ],
    align=True,
)
"""Tokens that a plug-in, the last logits or neighboring rankings predict for the positions after the root."""


def _find_in_model(records_at: int, node: int) -> int:
    """Return the maximum number of preceding tokens to look up in the model store.

    This is one token more than the longest match of the parent, or ``MAX_PREFIX_TOKENS`` if that match is unknown: at
    the root, or if the parent's estimate ended before a match was found.
    """
    work = work_at(records_at)
    deepest, parent = MAX_PREFIX_TOKENS, work.parents[node]
    if node > 0 and (work.known[parent] > 0 or not work.cut[parent]):
        deepest = min(MAX_PREFIX_TOKENS, work.known[parent] + 1)
    work.known[node] = 0
    prefetch_entries(record_at(records_at, MODEL_NUMBER, MODEL_RECORD), work.suffix_hashes, deepest)
    return deepest


def _weigh_model(records_at: int, node: int, order: int, first: int, left: float) -> float:
    work, model = work_at(records_at), record_at(records_at, MODEL_NUMBER, MODEL_RECORD)
    start, stop, total, distinct = lookup_hash(model, work.suffix_hashes[order])
    if total == 0:
        return left
    work.known[node] = max(work.known[node], order)
    rows = rows_of(model)[start:stop]
    bucket = evidence_bucket(total, spread_of(total, distinct))
    return contribute(records_at, MODEL_NUMBER, first + order - 1, rows[:, 0], rows[:, 1], total, bucket, left)


MODEL_SOURCE = CompiledSource(
    SourceId.MODEL, 1, Prior(MAX_PREFIX_TOKENS, 0.9, 0.75, 0.4, 0.05), _find_in_model, _weigh_model
)


@cache
def corpus_source(dtype: str) -> CompiledSource:
    """Return the source that reads a corpus index with tokens of this dtype."""
    token = getattr(np, dtype)

    def find(records_at: int, node: int) -> int:
        if node > 0:
            ranges_at(records_at).lowest[node] = MAX_RANGE_ORDER + 1
        return MAX_RANGE_ORDER

    def weigh(records_at: int, node: int, order: int, first: int, left: float) -> float:
        if left < CORPUS_SEARCH_FACTOR * work_at(records_at).min_left:
            return left
        work, ranges = work_at(records_at), ranges_at(records_at)
        corpus = array_at(ranges.shards[0, 0], ranges.shards[0, 1], token)
        if node > 0:
            ranges.lowest[node] = order
            narrow(corpus, ranges, work.tails[node], node, work.parents[node], order)
        num_matches = size_of(ranges, node, order)
        if num_matches == 0:
            return left
        if ranges.read[node, order] == 0:
            # The less probability is left, the fewer samples are read: only frequent followers matter then.
            read_samples(
                corpus, ranges, node, order, num_matches, max(MIN_SAMPLES, min(MAX_SAMPLES, int(left / work.min_left)))
            )
        distinct = count_followers(ranges, node, order, work.corpus_evidence, work.corpus_counts)
        if distinct == 0:
            return left
        tokens, counts = work.corpus_evidence[:distinct], work.corpus_counts[:distinct]
        read, bucket = ranges.read[node, order], evidence_bucket(num_matches, spread_of(num_matches, distinct))
        return contribute(records_at, CORPUS_NUMBER, first + order - 1, tokens, counts, read, bucket, left)

    def move(records_at: int, follower: int, emitted: int) -> None:
        ranges = ranges_at(records_at)
        if follower == RESTART:
            bounds_of(ranges)[0] = 0
            ranges.read[0] = 0
            return
        corpus = array_at(ranges.shards[0, 0], ranges.shards[0, 1], token)
        # Narrow in place, from the longest range on: each follows from the next shorter range of the previous root.
        for order in range(MAX_RANGE_ORDER, 0, -1):
            narrow(corpus, ranges, work_at(records_at).tails[0], 0, 0, order)

    return CompiledSource(SourceId.CORPUS, 1, Prior(MAX_RANGE_ORDER, 0.9, 0.75, 0.35, 0.12), find, weigh, move)


@compiled
def ranges_at(records_at: int) -> Any:
    return record_at(records_at, CORPUS_NUMBER, RANGES)


def prediction_records(sources: Sequence[SourceId]) -> Array:
    """Return empty prediction records for these sources."""
    records = np.zeros(len(sources), PREDICTION_RECORD)
    records["source"], records["chain"] = sources, ANY_TOKEN
    return records


def _note(record: Any, position: int, tokens: Array, probs: Array) -> None:
    record["tokens"][position], record["shares"][position] = NO_CHAIN_TOKEN, 0
    record["tokens"][position, : len(tokens)], record["shares"][position, : len(tokens)] = tokens, probs * MILLION
    record["count"] = position + 1


class Plugins:
    """Sources of evidence written in Python, and the records of what they predict."""

    def __init__(self, evidence: Mapping[SourceId, Evidence]) -> None:
        self._evidence = dict(evidence)
        self.records = prediction_records([*evidence, *[SourceId.NONE] * (MAX_PLUGINS - len(evidence))])
        self.seconds = dict.fromkeys(evidence, 0.0)
        """Seconds spent in each source."""

    def predict(self, context: Sequence[int]) -> None:
        """Update the records to what the plug-ins predict after a context."""
        for record, (source, evidence) in zip(self.records, self._evidence.items(), strict=False):
            started = time.perf_counter()
            note_plugin(record, evidence, context)
            self.seconds[source] += time.perf_counter() - started


def note_plugin(record: Any, evidence: Evidence, context: Sequence[int]) -> None:
    """Store what a plug-in written in Python predicts after a context and along the chain of its argmax tokens."""
    record["count"] = record["ahead"] = 0
    path = list(context)
    for position in range(MAX_PLUGIN_POSITIONS):
        shares_by_token = evidence(path)
        tokens = np.fromiter(shares_by_token.keys(), np.int64, len(shares_by_token))
        values = np.fromiter(shares_by_token.values(), np.float64, len(shares_by_token))
        usable = np.isfinite(values) & (values > 0)
        tokens, values = tokens[usable], values[usable]
        if not len(tokens):
            return
        best = np.argsort(-values, kind="stable")[:MAX_PREDICTED_TOKENS]
        _note(record, position, tokens[best], values[best] / max(1.0, values.sum()))
        record["chain"][position] = tokens[best[0]]
        path.append(int(tokens[best[0]]))


@compiled
def position_after(record: Any, depth: int) -> int:
    """Return the index of the predicted position after a node at this depth, or -1 if there is none."""
    position = depth + record.ahead
    return int(position) if position < record.count else -1


@compiled
def _position_on_chain(record: Any, tail: Array, depth: int) -> int:
    """Return the index of the predicted position after a node; ``tail`` holds the last tokens of the path to it.

    Return -1 if there is no such position, or if the path to the node deviates from the chain.
    """
    for step in range(depth if record.ahead + depth < record.count else 0):
        token = record.chain[record.ahead + step]
        if token != ANY_TOKEN and token != tail[len(tail) - depth + step]:
            return -1
    return position_after(record, depth)


@compiled
def advance_record(record: Any, token: int) -> None:
    """Advance a record by an emitted token; a token that deviates from the chain ends the prediction."""
    position = record.ahead
    is_on_chain = position < record.count and (record.chain[position] == ANY_TOKEN or record.chain[position] == token)
    record.ahead += 1
    if token == RESTART or not is_on_chain:
        record.count = 0


def prediction_source(name: SourceId, order: int, prior: Prior, records: int = 1) -> CompiledSource:
    """Return a source that reads an array of prediction records; ``records`` is their number.

    Each of several records has one row of weights; a single record has a row for each position.
    """
    number = name.value

    def find(records_at: int, node: int) -> int:
        return order

    def weigh(records_at: int, node: int, _: int, first: int, left: float) -> float:
        work = work_at(records_at)
        for slot in range(records):
            record = record_array_at(records_at, number, records, PREDICTION_RECORD)[slot]
            position = _position_on_chain(record, work.tails[node], work.depths[node])
            if position >= 0:
                tokens, shares = record.tokens[position], record.shares[position]
                row, bucket = first + (slot if records > 1 else position), share_bucket(shares[0], MILLION)
                left = contribute(records_at, record.source, row, tokens, shares, MILLION, bucket, left)
                lap(work, record.source)
        return left

    def move(records_at: int, token: int, emitted: int) -> None:
        for slot in range(records):
            advance_record(record_array_at(records_at, number, records, PREDICTION_RECORD)[slot], token)

    return CompiledSource(name, order, prior, find, weigh, move)


PLUGIN_SOURCE = prediction_source(SourceId.PLUGIN_1, BEFORE_ORDER, Prior(MAX_PLUGINS, 0.5, 0.85), MAX_PLUGINS)


TRAINED_NUMBER = SourceId.HEADS.value
TRAINED_WEIGHT_ROWS = MAX_HEADS
"""Number of rows of weights, one for each depth; rankings at greater depths share the last row."""

PROPOSAL_RECORD = np.dtype(
    [
        ("source", np.int64),
        ("root", np.int64),  # the ranking that follows the root, or NO_RANKING_AFTER
        ("of_node", np.int64, RANGE_ROWS),  # the ranking that follows each node of the tree, or NO_RANKING_AFTER
        ("tokens", np.int64, (MAX_RANKINGS, TOKENS_PER_RANKING)),
        ("shares", np.int64, (MAX_RANKINGS, TOKENS_PER_RANKING)),
        ("after", np.int64, (MAX_RANKINGS, TOKENS_PER_RANKING)),
        ("after_others", np.int64, MAX_RANKINGS),
        ("depths", np.int64, MAX_RANKINGS),
    ],
    align=True,
)


def no_proposal() -> Array:
    """Return a record without a proposal."""
    record = np.zeros(1, PROPOSAL_RECORD)
    record["source"], record["root"] = SourceId.HEADS, NO_RANKING_AFTER
    return record


def note_proposal(record: Any, source: SourceId, proposal: Proposal) -> None:
    """Store a trained drafter's proposal: rankings of the tokens after the root and after paths below it."""
    record["source"], record["root"] = source, 0 if len(proposal.tokens) else NO_RANKING_AFTER
    number, best = proposal.tokens.shape
    record["tokens"][:number], record["shares"][:number] = NO_RANKING_AFTER, 0
    record["tokens"][:number, :best], record["shares"][:number, :best] = proposal.tokens, proposal.probs * MILLION
    record["after"][:number, :best] = proposal.after
    record["after_others"][:number], record["depths"][:number] = proposal.after_others, proposal.depths


@compiled
def _proposed_at(records_at: int) -> Any:
    return record_at(records_at, TRAINED_NUMBER, PROPOSAL_RECORD)


@compiled
def ranking_after(record: Any, ranking: int, token: int) -> int:
    """Return the index of the ranking that follows ``ranking`` if ``token`` is next, or ``NO_RANKING_AFTER``."""
    if ranking == NO_RANKING_AFTER:
        return NO_RANKING_AFTER
    for rank in range(TOKENS_PER_RANKING):
        if record.tokens[ranking, rank] == token:
            return int(record.after[ranking, rank])
    return int(record.after_others[ranking])


def _find_proposed(records_at: int, node: int) -> int:
    work, record = work_at(records_at), _proposed_at(records_at)
    if node == 0:
        record.of_node[0] = record.root
    else:
        record.of_node[node] = ranking_after(record, record.of_node[work.parents[node]], work.tokens[node])
    return BEFORE_ORDER if record.of_node[node] != NO_RANKING_AFTER else -1


def _weigh_proposed(records_at: int, node: int, _: int, first: int, left: float) -> float:
    work, record = work_at(records_at), _proposed_at(records_at)
    ranking = record.of_node[node]
    tokens, shares = record.tokens[ranking], record.shares[ranking]
    row, bucket = first + min(record.depths[ranking], TRAINED_WEIGHT_ROWS - 1), share_bucket(shares[0], MILLION)
    left = contribute(records_at, record.source, row, tokens, shares, MILLION, bucket, left)
    lap(work, record.source)
    return left


def _move_proposed(records_at: int, token: int, emitted: int) -> None:
    record = _proposed_at(records_at)
    record.root = NO_RANKING_AFTER if token == RESTART else ranking_after(record, record.root, token)


TRAINED_SOURCE = CompiledSource(
    SourceId.HEADS,
    BEFORE_ORDER,
    Prior(TRAINED_WEIGHT_ROWS, 0.5, 0.85),
    _find_proposed,
    _weigh_proposed,
    _move_proposed,
)
