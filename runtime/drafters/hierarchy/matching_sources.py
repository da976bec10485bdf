"""Sources that match text: the conversation, a prediction of the answer, and the history of other answers.

Each source keeps a ring buffer of tokens with hash chains through it, like LZ compressors. Matches are looked up at the
root. A node inherits those matches of its parent that continue with the node's token; further matches are looked up
only if none is left, or once the estimate reaches short n-grams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.compiled_source import (
    MAX_HASHED_TOKENS,
    CompiledSource,
    Prior,
    record_at,
    work_at,
)
from hdtool.runtime.drafters.hierarchy.token_probabilities import MANY_TOKENS, contribute, evidence_bucket
from hdtool.runtime.kernels.compiled import Array, Ints, array_at, compiled
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.context_table import (
    CHAIN_LENGTHS,
    CONTEXT_TABLE,
    CONTEXT_WINDOW,
    LONG_CHAIN,
    SHORT_CHAIN,
    add,
    head_of,
)
from hdtool.runtime.stores.suffix_ranges import RANGE_ROWS
from hdtool.runtime.stores.token_log import (
    CHAIN_KEY_TOKENS,
    LANE,
    LOG,
    MAX_MATCH_TOKENS,
    MAX_MATCHES,
    TOKEN,
    append,
    end_of,
    entries_of,
    follow_chain,
    search,
)

MATCH_ORDERS = MAX_HASHED_TOKENS + 4
"""Number of n-gram orders of matches: one for each length up to 8, then for up to 12, 16, 24 and 32 tokens."""
MAX_SHORT_ORDER = CHAIN_LENGTHS[LONG_CHAIN] - 1
"""Highest n-gram order of matches from the short chain, which is read only if longer matches do not suffice."""
MAX_ROOT_MATCHES, MAX_NODE_MATCHES = 64, 16
"""Maximum number of matches read from a chain at the root, and at nodes below it; older matches add little."""
MAX_CHAIN_VISITS = 2 * MAX_ROOT_MATCHES
"""Maximum number of positions visited in a chain, hash collisions included."""
MAX_NODE_LOG_MATCHES = 8
"""Maximum number of matches looked up in a log at a node below the root."""
ANSWERS_LOG, STORED_LOG, NUM_LOGS = range(3)
"""Indices of the history's logs: the answers of this process, and the store on disk. Other sources have only the first
log."""
NO_OWNERS = np.empty(0, np.int32)

MATCH_RECORD = np.dtype(
    [
        ("log", np.int64, NUM_LOGS),  # addresses of the context table or of token logs, or 0
        ("owner", np.int64),  # the current answer, which is skipped in logs as the context table matches it
        ("lane", np.int64),  # address of the record with which the answer is appended to its log
        # The matches of each node.
        ("count", np.int64, (NUM_LOGS, RANGE_ROWS)),
        ("shortest", np.int64, RANGE_ROWS),  # matches of fewer tokens have not been looked up
        ("positions", np.int32, (NUM_LOGS, RANGE_ROWS, MAX_ROOT_MATCHES)),
        ("lengths", np.int32, (NUM_LOGS, RANGE_ROWS, MAX_ROOT_MATCHES)),
        # The tokens that follow the matches of the current node.
        ("followers", np.int64),  # number of these tokens
        ("tokens", np.int64, MAX_ROOT_MATCHES),
        ("orders", np.int64, MAX_ROOT_MATCHES),  # n-gram order of the match before each token
        ("of_order", np.int64, MATCH_ORDERS + 1),  # number of matches by n-gram order
        ("highest", np.int64),  # highest n-gram order
        ("total", np.int64),  # number of tokens counted so far
        ("distinct", np.int64),  # number of distinct tokens among them
        ("different", np.int64, MAX_ROOT_MATCHES),  # the distinct tokens
        ("counts", np.int64, MAX_ROOT_MATCHES),
    ],
    align=True,
)


@compiled
def order_of_match(length: int) -> int:
    """Return the n-gram order of a match of this length."""
    if length <= MAX_HASHED_TOKENS:
        return length
    return MAX_HASHED_TOKENS + (1 if length <= 12 else 2 if length <= 16 else 3 if length <= 24 else 4)


@compiled
def matches_at(records_at: int, source: int) -> Any:
    """Return the match record of a source."""
    return record_at(records_at, source, MATCH_RECORD)


@compiled
def table_of(matches: Any) -> Any:
    return array_at(matches.log[ANSWERS_LOG], 1, CONTEXT_TABLE)[0]


def _find_in_context(records_at: int, node: int) -> int:
    work, matches = work_at(records_at), matches_at(records_at, CONTEXT_NUMBER)
    find_matches(table_of(matches), matches, node, work.parents[node], work.tails[node], work.suffix_hashes)
    return max(matches.highest, MAX_SHORT_ORDER)  # type: ignore[no-any-return]


def _weigh_context(records_at: int, node: int, order: int, first: int, left: float) -> float:
    work, matches = work_at(records_at), matches_at(records_at, CONTEXT_NUMBER)
    if order == min(MAX_SHORT_ORDER, matches.shortest[node] - 1):
        add_short_matches(table_of(matches), matches, node, work.tails[node], work.suffix_hashes)
    return _weigh(records_at, CONTEXT_NUMBER, matches, order, first, left)


@compiled
def find_matches(table: Any, matches: Any, node: int, parent: int, tail: Array, suffix_hashes: Array) -> None:
    """Find where the last tokens of the path to a node occur in the conversation, and which tokens follow there."""
    _begin(matches, node)
    if node == 0:
        matches.shortest[0] = CHAIN_LENGTHS[LONG_CHAIN]
        _look_up(table, matches, 0, LONG_CHAIN, MAX_ROOT_MATCHES, tail, suffix_hashes)
    else:
        matches.shortest[node] = matches.shortest[parent] + 1
        _inherit(matches, 0, node, parent, tail[MAX_MATCH_TOKENS - 1], table.ring, table.end)
        if matches.count[0, node] == 0:
            matches.shortest[node] = CHAIN_LENGTHS[SHORT_CHAIN]
            _look_up(table, matches, node, SHORT_CHAIN, MAX_NODE_MATCHES, tail, suffix_hashes)
    _add_followers(matches, 0, 0, node, table.ring, MAX_MATCH_TOKENS)


@compiled
def add_short_matches(table: Any, matches: Any, node: int, tail: Array, suffix_hashes: Array) -> None:
    """Look up a node in the chain of short n-grams, and add matches that are shorter than all found so far."""
    num_longer = matches.count[0, node]
    _look_up(
        table, matches, node, SHORT_CHAIN, MAX_ROOT_MATCHES if node == 0 else MAX_NODE_MATCHES, tail, suffix_hashes
    )
    matches.shortest[node] = CHAIN_LENGTHS[SHORT_CHAIN]
    _add_followers(matches, 0, num_longer, node, table.ring, MAX_SHORT_ORDER)


def _add_to_context(records_at: int, token: int, emitted: int) -> None:
    if emitted:
        add(table_of(matches_at(records_at, CONTEXT_NUMBER)), token)


def _log_source(name: SourceId, prior: Prior) -> CompiledSource:
    """Return a source that finds matches in token logs."""
    number = name.value

    def find(records_at: int, node: int) -> int:
        work, matches = work_at(records_at), matches_at(records_at, number)
        _begin(matches, node)
        for log in range(NUM_LOGS):
            if matches.log[log]:
                _find_in_log(work, matches, log, node)
        return matches.highest  # type: ignore[no-any-return]

    def weigh(records_at: int, node: int, order: int, first: int, left: float) -> float:
        matches = matches_at(records_at, number)
        return _weigh(records_at, number, matches, order, first, left)

    def move(records_at: int, token: int, emitted: int) -> None:
        if emitted:
            append_to_log(matches_at(records_at, number), token)

    return CompiledSource(name, CHAIN_KEY_TOKENS, prior, find, weigh, move)


@compiled
def append_to_log(matches: Any, token: int) -> None:
    """Append a token to the log of the current answer, if there is one."""
    if matches.lane:
        lane = array_at(matches.lane, 1, LANE)[0]
        if lane.owner > 0:
            append(array_at(matches.log[ANSWERS_LOG], 1, LOG)[0], lane, token, True)


@compiled
def _begin(matches: Any, node: int) -> None:
    matches.followers = matches.total = matches.distinct = 0
    matches.highest, matches.of_order[:] = -1, 0
    matches.count[:, node] = 0


@compiled
def _find_in_log(work: Any, matches: Any, log: int, node: int) -> None:
    """Find the matches of a node in a log: inherit them from its parent or, if none is left, search the log."""
    record, tail = array_at(matches.log[log], 1, LOG), work.tails[node]
    tokens = entries_of(record[0])[:, TOKEN]
    if node > 0:
        _inherit(matches, log, node, work.parents[node], tail[MAX_MATCH_TOKENS - 1], tokens, end_of(record[0]))
    if matches.count[log, node] == 0:
        max_positions = MAX_MATCHES if node == 0 else MAX_NODE_LOG_MATCHES
        positions, lengths = matches.positions[log, node, :max_positions], matches.lengths[log, node, :max_positions]
        matches.count[log, node] = search(
            record[0], matches.owner, tail, work.suffix_hashes[CHAIN_KEY_TOKENS], positions, lengths
        )
    _add_followers(matches, log, 0, node, tokens, MAX_MATCH_TOKENS)


@compiled
def _inherit(matches: Any, log: int, node: int, parent: int, token: Any, tokens: Ints, end: Any) -> None:
    """Copy the parent's matches that continue with the node's token, each extended by this token."""
    count, mask = 0, len(tokens) - 1
    for index in range(matches.count[log, parent]):
        position = matches.positions[log, parent, index]
        if tokens[position & mask] == token and position + 1 < end:
            matches.positions[log, node, count] = position + 1
            matches.lengths[log, node, count] = min(matches.lengths[log, parent, index] + 1, MAX_MATCH_TOKENS)
            count += 1
    matches.count[log, node] = count


@compiled
def _look_up(
    table: Any, matches: Any, node: int, chain: int, max_positions: int, tail: Array, suffix_hashes: Array
) -> None:
    """Read at most ``max_positions`` of the latest matches in a chain, and add those that the node still lacks."""
    oldest, start = (
        max(np.int64(0), table.end - CONTEXT_WINDOW),
        table.heads[chain, head_of(suffix_hashes[CHAIN_LENGTHS[chain]])],
    )
    count = matches.count[0, node]
    limits = (CHAIN_LENGTHS[chain], MAX_MATCH_TOKENS if count == 0 else matches.shortest[node] - 1)
    ring, previous, positions, lengths = (
        table.ring,
        table.previous[chain],
        matches.positions[0, node],
        matches.lengths[0, node],
    )
    matches.count[0, node] = follow_chain(
        ring,
        previous,
        NO_OWNERS,
        0,
        start,
        oldest,
        tail,
        limits,
        max_positions,
        MAX_CHAIN_VISITS,
        positions,
        lengths,
        count,
    )


@compiled
def _add_followers(matches: Any, log: int, first: int, node: int, tokens: Ints, max_order: int) -> None:
    """Add the token after each match from index ``first`` on; cap its n-gram order at ``max_order``."""
    mask = len(tokens) - 1
    for index in range(first, matches.count[log, node]):
        token = tokens[matches.positions[log, node, index] & mask]
        if token >= 0 and matches.followers < MAX_ROOT_MATCHES:
            order = min(max_order, order_of_match(matches.lengths[log, node, index]))
            matches.tokens[matches.followers], matches.orders[matches.followers] = token, order
            matches.followers += 1
            matches.of_order[order] += 1
            matches.highest = max(matches.highest, order)


@compiled
def _weigh(records_at: int, source: int, matches: Any, order: int, first: int, left: float) -> float:
    """Add to the candidates the tokens after matches of at least this order; return the probability that is left."""
    for follower in range(matches.followers if matches.of_order[order] > 0 else 0):
        if matches.orders[follower] == order:
            token, different = matches.tokens[follower], 0
            while different < matches.distinct and matches.different[different] != token:
                different += 1
            if different == matches.distinct:
                matches.different[different], matches.counts[different] = token, 0
                matches.distinct += 1
            matches.counts[different] += 1
            matches.total += 1
    if matches.total == 0:
        return left
    tokens, counts = matches.different[: matches.distinct], matches.counts[: matches.distinct]
    # Unlike in stores, matches that all continue alike are not more reliable, so their spread is not considered.
    bucket = evidence_bucket(matches.total, MANY_TOKENS)
    return contribute(records_at, source, first + order - 1, tokens, counts, matches.total, bucket, left)


_OWN_TEXT_PRIOR = Prior(MATCH_ORDERS, many=0.25)
CONTEXT_NUMBER = SourceId.CONTEXT.value
CONTEXT_SOURCE = CompiledSource(SourceId.CONTEXT, 1, _OWN_TEXT_PRIOR, _find_in_context, _weigh_context, _add_to_context)
PREDICTION_SOURCE = _log_source(SourceId.PREDICTION, _OWN_TEXT_PRIOR)
HISTORY_SOURCE = _log_source(SourceId.HISTORY, Prior(MATCH_ORDERS, many=0.06))
