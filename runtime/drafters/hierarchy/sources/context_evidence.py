"""Evidence of the context table at a node of a growing tree.

The root's matches are looked up, and a node inherits those of its parent that its token continues. Shorter matches are
looked up only where no match is left or where short n-grams count, so a draft walks few chains.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.sources.context_table import (
    CHAINS,
    LONG,
    PLACES,
    SHORT,
    STEPS,
    WINDOW,
    head_of,
    length_at,
    level_of,
)
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.tree import LARGEST_TREE

PLACES_BELOW = 16
"""Places that are read of a chain at nodes below the root."""
LONGEST_SHORT = CHAINS[LONG] - 1
"""The highest n-gram order of matches that are looked up in the short chain because longer ones do not suffice."""
ROWS = LARGEST_TREE + 1

CONTEXT_MATCHES = np.dtype(
    [
        ("count", np.int64, ROWS),  # of matches, by node
        ("shortest", np.int64, ROWS),  # matches of fewer tokens have not been looked up
        ("places", np.int32, (ROWS, PLACES)),
        ("lengths", np.int32, (ROWS, PLACES)),
    ],
    align=True,
)


@compiled
def find_matches(table: Any, matches: Any, node: int, parent: int, tail: Array, marks: Array, found: Any) -> None:
    """Add the tokens after the places in the conversation that match the tail of a node to ``found``."""
    matches.count[node] = 0
    if node == 0:
        matches.shortest[0] = CHAINS[LONG]
        _look_up(table, matches, 0, LONG, PLACES, tail, marks)
    else:
        matches.shortest[node] = matches.shortest[parent] + 1
        _inherit(table, matches, node, parent, tail[len(tail) - 1])
        if matches.count[node] == 0:
            matches.shortest[node] = CHAINS[SHORT]
            _look_up(table, matches, node, SHORT, PLACES_BELOW, tail, marks)
    _add_followers(table, matches, node, LONGEST_MATCH, found)


@compiled
def find_short_matches(table: Any, matches: Any, node: int, tail: Array, marks: Array, found: Any) -> None:
    """Add those of the latest places after the last token that are shorter than the matches so far."""
    before = matches.count[node]
    _look_up(table, matches, node, SHORT, PLACES if node == 0 else PLACES_BELOW, tail, marks)
    matches.shortest[node] = CHAINS[SHORT]
    if matches.count[node] > before:
        _add_followers(table, matches, node, LONGEST_SHORT, found)


@compiled
def _inherit(table: Any, matches: Any, node: int, parent: int, token: Any) -> None:
    """Take over the places of the parent that the token of a node continues."""
    count = 0
    for at in range(matches.count[parent]):
        place = matches.places[parent, at]
        if table.ring[place & (WINDOW - 1)] == token and place + 1 < table.end:
            matches.places[node, count] = place + 1
            matches.lengths[node, count] = min(matches.lengths[parent, at] + 1, LONGEST_MATCH)
            count += 1
    matches.count[node] = count


@compiled
def _look_up(table: Any, matches: Any, node: int, chain: int, most: int, tail: Array, marks: Array) -> None:
    """Read at most so many of the latest matches of a chain, and add those that the node does not have."""
    oldest = max(np.int64(0), table.end - WINDOW)
    place = np.int64(table.heads[chain, head_of(marks[CHAINS[chain]])])
    count, read = matches.count[node], 0
    longest = LONGEST_MATCH if count == 0 else matches.shortest[node] - 1
    for _ in range(STEPS):
        if place <= oldest or read == most or count == PLACES:
            break
        length = length_at(table, tail, place, oldest)
        if length >= CHAINS[chain]:
            read += 1
            if length <= longest:
                matches.places[node, count], matches.lengths[node, count] = place, length
                count += 1
        place = np.int64(table.before[chain, place & (WINDOW - 1)])
    matches.count[node] = count


@compiled
def _add_followers(table: Any, matches: Any, node: int, highest: int, found: Any) -> None:
    """Add the tokens after the matches that are not in ``found`` yet, at no higher n-gram order than ``highest``."""
    for at in range(found.places, matches.count[node]):
        found.followers[at] = table.ring[matches.places[node, at] & (WINDOW - 1)]
        found.orders[at] = min(highest, level_of(matches.lengths[node, at]))
    found.places = matches.count[node]
