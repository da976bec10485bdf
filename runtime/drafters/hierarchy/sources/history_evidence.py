"""Evidence of token logs at a node of a growing tree: of the history, and of a prediction of the answer.

The root's matches are looked up, and a node inherits those of its parent that its token continues. A match is looked
up again only where none is left, so a draft reads little memory, however long the history.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.sources.context_table import PLACES, level_of
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH, MATCHES, search
from hdtool.runtime.stores.history.token_log import LOG, TOKEN, end_of, places_of
from hdtool.runtime.tree import LARGEST_TREE

ANSWERS, STORED, PREDICTION = range(3)
"""The logs: answers of this process, the history store, and the prediction."""
LOGS = 3
MATCHES_BELOW = 8
"""Places that are found at most at other nodes than the root."""
ROWS = LARGEST_TREE + 1

LOG_MATCHES = np.dtype(
    [
        ("log", np.int64),  # address of the log, or 0
        ("owner", np.int64),  # its own answer, which the context table matches
        ("count", np.int64, ROWS),  # of matches, by node
        ("places", np.int64, (ROWS, MATCHES)),
        ("lengths", np.int64, (ROWS, MATCHES)),
    ],
    align=True,
)


@compiled
def find_matches(matches: Any, node: int, parent: int, tail: Array, pair_hash: np.uint64, found: Any) -> None:
    """Add the tokens after the places of a log that match the tail of a node to ``found``."""
    if matches.log == 0:
        return
    log = array_at(matches.log, 1, LOG)[0]
    places, mask, count = places_of(log), log.size - 1, 0
    if node > 0:
        token, end = tail[len(tail) - 1], end_of(log)
        for at in range(matches.count[parent]):
            place = matches.places[parent, at]
            if places[place & mask, TOKEN] == token and place + 1 < end:
                matches.places[node, count] = place + 1
                matches.lengths[node, count] = min(matches.lengths[parent, at] + 1, LONGEST_MATCH)
                count += 1
    if count == 0:
        most = MATCHES if node == 0 else MATCHES_BELOW
        found_at, lengths = matches.places[node, :most], matches.lengths[node, :most]
        count = search(log, matches.owner, tail, pair_hash, found_at, lengths)
    matches.count[node] = count
    for at in range(count):
        token = places[matches.places[node, at] & mask, TOKEN]
        if token >= 0 and found.places < PLACES:
            found.followers[found.places] = token
            found.orders[found.places] = level_of(matches.lengths[node, at])
            found.places += 1
