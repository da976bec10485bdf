"""Sources that match text: the conversation, a prediction of the answer, and the history of other answers.

Each keeps a ring of tokens with chains through it, as compressors of the LZ family do. The root's matches are looked
up, and a node inherits those of its parent that its token continues; others are looked up only where none is left, or
where short n-grams count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.candidates import (
    LONGEST_HASH,
    MANY,
    Prior,
    Source,
    bucket_of,
    contribute,
    record_at,
    work_at,
)
from hdtool.runtime.kernels.compiled import Array, Ints, array_at, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import ROWS
from hdtool.runtime.stores.live_tables import CHAINS, CONTEXT_TABLE, LONG, SHORT, WINDOW, add, head_of
from hdtool.runtime.stores.token_log import (
    CHAINED,
    LANE,
    LOG,
    LONGEST_MATCH,
    MATCHES,
    TOKEN,
    append,
    end_of,
    follow_chain,
    places_of,
    search,
)

LEVELS = LONGEST_HASH + 4
"""The n-gram orders of matches: their length up to 8, and then up to 12, 16, 24 and 32 tokens."""
LONGEST_SHORT = CHAINS[LONG] - 1
"""The highest n-gram order of matches that are looked up in the short chain because longer ones do not suffice."""
PLACES, PLACES_BELOW = 64, 16
"""Places that are read of a chain at the root, and at nodes below it; older ones add little."""
STEPS = 2 * PLACES
"""Places that are visited of a chain, hash collisions included."""
LOG_PLACES_BELOW = 8
"""Places of a log that are found at most at nodes below the root."""
ANSWERS, STORED, LOGS = range(3)
"""The logs of the history: answers of this process, and the store on the disk. Other sources have the first alone."""
NO_OWNERS = np.empty(0, np.int32)

FOUND = np.dtype(
    [
        ("log", np.int64, LOGS),  # addresses of the context table or of token logs, or 0
        ("owner", np.int64),  # the answer in hand, which the context table matches
        ("lane", np.int64),  # address of the record with which it is appended to its log
        # The matches of each node.
        ("count", np.int64, (LOGS, ROWS)),
        ("shortest", np.int64, ROWS),  # matches of fewer tokens have not been looked up
        ("places", np.int32, (LOGS, ROWS, PLACES)),
        ("lengths", np.int32, (LOGS, ROWS, PLACES)),
        # What follows the matches of the node in hand.
        ("followers", np.int64),  # how many there are
        ("tokens", np.int64, PLACES),  # the token after each,
        ("orders", np.int64, PLACES),  # and the n-gram order of its match
        ("of_order", np.int64, LEVELS + 1),  # how many of them have each order,
        ("highest", np.int64),  # and the highest one
        ("total", np.int64),  # followers that were counted
        ("distinct", np.int64),
        ("different", np.int64, PLACES),  # the different ones among them
        ("counts", np.int64, PLACES),
    ],
    align=True,
)


@compiled
def level_of(length: int) -> int:
    """The n-gram order of a match."""
    if length <= LONGEST_HASH:
        return length
    return LONGEST_HASH + (1 if length <= 12 else 2 if length <= 16 else 3 if length <= 24 else 4)


@compiled
def found_at(at: int, source: int) -> Any:
    """The matches of a source."""
    return record_at(at, source, FOUND)


@compiled
def table_of(matches: Any) -> Any:
    return array_at(matches.log[ANSWERS], 1, CONTEXT_TABLE)[0]


def _find_in_context(at: int, node: int) -> int:
    work, matches = work_at(at), found_at(at, OF_CONTEXT)
    find_matches(table_of(matches), matches, node, work.parents[node], work.tails[node], work.marks)
    return max(matches.highest, LONGEST_SHORT)  # type: ignore[no-any-return]


def _weigh_context(at: int, node: int, order: int, first: int, left: float) -> float:
    work, matches = work_at(at), found_at(at, OF_CONTEXT)
    if order == min(LONGEST_SHORT, matches.shortest[node] - 1):
        add_short_matches(table_of(matches), matches, node, work.tails[node], work.marks)
    return _weigh(at, OF_CONTEXT, matches, order, first, left)


@compiled
def find_matches(table: Any, matches: Any, node: int, parent: int, tail: Array, marks: Array) -> None:
    """Find the places in the conversation that match the tail of a node, and the tokens after them."""
    _begin(matches, node)
    if node == 0:
        matches.shortest[0] = CHAINS[LONG]
        _look_up(table, matches, 0, LONG, PLACES, tail, marks)
    else:
        matches.shortest[node] = matches.shortest[parent] + 1
        _inherit(matches, 0, node, parent, tail[LONGEST_MATCH - 1], table.ring, table.end)
        if matches.count[0, node] == 0:
            matches.shortest[node] = CHAINS[SHORT]
            _look_up(table, matches, node, SHORT, PLACES_BELOW, tail, marks)
    _add_followers(matches, 0, 0, node, table.ring, LONGEST_MATCH)


@compiled
def add_short_matches(table: Any, matches: Any, node: int, tail: Array, marks: Array) -> None:
    """Add those of the latest places after the last token that are shorter than the matches so far."""
    before = matches.count[0, node]
    _look_up(table, matches, node, SHORT, PLACES if node == 0 else PLACES_BELOW, tail, marks)
    matches.shortest[node] = CHAINS[SHORT]
    _add_followers(matches, 0, before, node, table.ring, LONGEST_SHORT)


def _add_to_context(at: int, token: int, emitted: int) -> None:
    if emitted:
        add(table_of(found_at(at, OF_CONTEXT)), token)


def _log_source(name: SourceName, prior: Prior) -> Source:
    """A source that matches token logs."""
    number = name.value

    def find(at: int, node: int) -> int:
        work, matches = work_at(at), found_at(at, number)
        _begin(matches, node)
        for log in range(LOGS):
            if matches.log[log]:
                _find_in_log(work, matches, log, node)
        return matches.highest  # type: ignore[no-any-return]

    def weigh(at: int, node: int, order: int, first: int, left: float) -> float:
        matches = found_at(at, number)
        return _weigh(at, number, matches, order, first, left)

    def move(at: int, token: int, emitted: int) -> None:
        if emitted:
            append_to_log(found_at(at, number), token)

    return Source(name, CHAINED, prior, find, weigh, move)


@compiled
def append_to_log(matches: Any, token: int) -> None:
    """Append a token to the answer in hand, if there is one."""
    if matches.lane:
        lane = array_at(matches.lane, 1, LANE)[0]
        if lane.owner > 0:
            append(array_at(matches.log[ANSWERS], 1, LOG)[0], lane, token, True)


@compiled
def _begin(matches: Any, node: int) -> None:
    matches.followers = matches.total = matches.distinct = 0
    matches.highest, matches.of_order[:] = -1, 0
    matches.count[:, node] = 0


@compiled
def _find_in_log(work: Any, matches: Any, log: int, node: int) -> None:
    """Find the matches of a node in a log, those of its parent first."""
    record, tail = array_at(matches.log[log], 1, LOG), work.tails[node]
    tokens = places_of(record[0])[:, TOKEN]
    if node > 0:
        _inherit(matches, log, node, work.parents[node], tail[LONGEST_MATCH - 1], tokens, end_of(record[0]))
    if matches.count[log, node] == 0:
        max_places = MATCHES if node == 0 else LOG_PLACES_BELOW
        places, lengths = matches.places[log, node, :max_places], matches.lengths[log, node, :max_places]
        matches.count[log, node] = search(record[0], matches.owner, tail, work.marks[CHAINED], places, lengths)
    _add_followers(matches, log, 0, node, tokens, LONGEST_MATCH)


@compiled
def _inherit(matches: Any, log: int, node: int, parent: int, token: Any, tokens: Ints, end: Any) -> None:
    """Take over the places of the parent that the token of a node continues."""
    count, mask = 0, len(tokens) - 1
    for at in range(matches.count[log, parent]):
        place = matches.places[log, parent, at]
        if tokens[place & mask] == token and place + 1 < end:
            matches.places[log, node, count] = place + 1
            matches.lengths[log, node, count] = min(matches.lengths[log, parent, at] + 1, LONGEST_MATCH)
            count += 1
    matches.count[log, node] = count


@compiled
def _look_up(table: Any, matches: Any, node: int, chain: int, max_places: int, tail: Array, marks: Array) -> None:
    """Read at most so many of the latest matches of a chain, and add those that the node does not have."""
    oldest, start = max(np.int64(0), table.end - WINDOW), table.heads[chain, head_of(marks[CHAINS[chain]])]
    count = matches.count[0, node]
    limits = (CHAINS[chain], LONGEST_MATCH if count == 0 else matches.shortest[node] - 1)
    ring, before, places, lengths = table.ring, table.before[chain], matches.places[0, node], matches.lengths[0, node]
    matches.count[0, node] = follow_chain(
        ring, before, NO_OWNERS, 0, start, oldest, tail, limits, max_places, STEPS, places, lengths, count
    )


@compiled
def _add_followers(matches: Any, log: int, first: int, node: int, tokens: Ints, highest: int) -> None:
    """Add the tokens after the matches from the ``first`` on, at no higher n-gram order than ``highest``."""
    mask = len(tokens) - 1
    for at in range(first, matches.count[log, node]):
        token = tokens[matches.places[log, node, at] & mask]
        if token >= 0 and matches.followers < PLACES:
            order = min(highest, level_of(matches.lengths[log, node, at]))
            matches.tokens[matches.followers], matches.orders[matches.followers] = token, order
            matches.followers += 1
            matches.of_order[order] += 1
            matches.highest = max(matches.highest, order)


@compiled
def _weigh(at: int, source: int, matches: Any, order: int, first: int, left: float) -> float:
    """Add the tokens after matches of this order or a higher one; return what is left."""
    for place in range(matches.followers if matches.of_order[order] > 0 else 0):
        if matches.orders[place] == order:
            token, different = matches.tokens[place], 0
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
    # Whether all matches go on alike does not tell how reliable they are, unlike in stores.
    bucket = bucket_of(matches.total, MANY)
    return contribute(at, source, first + order - 1, tokens, counts, matches.total, bucket, left)


_OWN_WORDS = Prior(LEVELS, many=0.25)
OF_CONTEXT = SourceName.CONTEXT.value
CONTEXT = Source(SourceName.CONTEXT, 1, _OWN_WORDS, _find_in_context, _weigh_context, _add_to_context)
PREDICTION = _log_source(SourceName.PREDICTION, _OWN_WORDS)
HISTORY = _log_source(SourceName.HISTORY, Prior(LEVELS, many=0.06))
