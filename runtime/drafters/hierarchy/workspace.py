"""The working memory of the tree builder: nodes, the best paths so far, and the candidates after one node.

It is one record of fixed size, which compiled code takes as one pointer: each array that Python passes costs a fifth
of a microsecond, and each one that a compiled function passes on costs a dozen words of the stack.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdtool.runtime.drafters.hierarchy.backoff_weights import ORDERS, WEIGHTS
from hdtool.runtime.drafters.hierarchy.sources.context_evidence import CONTEXT_MATCHES
from hdtool.runtime.drafters.hierarchy.sources.context_table import LONGEST_HASH, TABLE
from hdtool.runtime.drafters.hierarchy.sources.followers import FOLLOWERS
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import HEADS
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import LOG_MATCHES, LOGS
from hdtool.runtime.drafters.hierarchy.sources.last_logits import LAST
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import NEIGHBOURS
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import MOST_PLUGINS, PLUGIN
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import RECYCLED
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import RANGES, ROWS, SAMPLES
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.history.token_log import LANE
from hdtool.runtime.stores.model_store import MODEL
from hdtool.runtime.tree import LARGEST_TREE

CANDIDATES = 512
SLOTS = 2 * CANDIDATES

WORK = np.dtype(
    [
        # The nodes, a row each; row 0 is the last emitted token.
        ("tokens", np.int64, ROWS),
        ("parents", np.int32, ROWS),
        ("sources", np.uint8, ROWS),
        ("probs", np.float64, ROWS),  # that the target takes the whole path
        ("depths", np.int64, ROWS),
        ("tails", np.int64, (ROWS, LONGEST_MATCH)),  # the last tokens down to the node
        ("agreements", np.int64, ROWS),  # the kind of neighboring ranking that holds it
        ("known", np.int64, ROWS),  # the longest match in the model store
        # The nodes as a tree has them: the root is not counted, and probabilities are calibrated.
        ("above", np.int32, LARGEST_TREE),
        ("calibrated", np.float64, LARGEST_TREE),
        # Draft tokens that were accepted lately, and how many their probabilities predicted.
        ("accepted", np.float64),
        ("predicted", np.float64),
        # The best paths, most probable first: those that are nodes already, and those that may become nodes.
        ("best_probs", np.float64, LARGEST_TREE),
        ("best_keys", np.int64, LARGEST_TREE),  # agreement, source, parent and token in one number
        # Tokens that the tree begins with, as they are almost certain.
        ("expected", np.int64),
        ("chain", np.int64, LARGEST_TREE),
        # What may follow one node.
        ("size", np.int64),
        ("candidates", np.int64, CANDIDATES),
        ("chances", np.float64, CANDIDATES),
        ("agreed", np.int64, CANDIDATES),  # the kind of neighboring ranking that holds it
        ("recency", np.int64, CANDIDATES),  # the class of its distance from its latest place in the conversation
        ("parts", np.float64, (CANDIDATES, len(SourceName))),  # of each chance, by source
        ("round", np.int64),  # slots of earlier rounds are empty
        ("slots", np.int64, SLOTS),  # a hash table of candidates
        ("marks", np.uint64, LONGEST_HASH + 1),  # hashes of so many last tokens
        # Evidence of the order in use.
        ("corpus_evidence", np.int64, SAMPLES),
        ("corpus_counts", np.int64, SAMPLES),
        # The evidence of each order for an emitted token.
        ("used", np.int64),
        ("orders", np.int64, ORDERS),
        ("buckets", np.int64, ORDERS),
        ("shares", np.float64, ORDERS),
        ("explained", np.float64, ORDERS),
        ("last_open", np.float64),  # left to the candidates of the last logit; 0 if they were not used
        ("last_part", np.float64),  # of it, the token's
        ("last_kind", np.int64),
        # What the times of draws depend on.
        ("is_sampled", np.int64),
        ("seed", np.uint64),
        ("position", np.int64),  # of the token after the root
        # The sources in use.
        ("vocabulary", np.int64),  # no source may draft a token outside it
        ("has", np.int64, len(SourceName)),
        ("plugins", np.int64),  # how many of them are in use
        # The time of a draft that is timed, in nanoseconds by source; NONE is the tree itself.
        ("timed", np.int64),
        ("laps", np.int64, len(SourceName)),
        ("since", np.int64),
        ("instant", np.int64, 2),  # seconds and nanoseconds, as the clock gives them
        ("instant_at", np.int64),  # its address
    ],
    align=True,
)


class Memory(NamedTuple):
    """The records that compiled code reads and writes while it drafts; of plug-ins, followers and matches several."""

    work: Array
    weights: Array
    table: Array
    model: Array
    ranges: Array
    last: Array
    recycled: Array
    near: Array
    heads: Array
    plugins: Array
    followers: Array
    matches: Array
    context: Array
    lane: Array

    def addresses(self) -> Array:
        """The addresses of the records, for ``memory_at``; the records must outlive them."""
        assert all(array.flags.aligned for array in self)
        return np.array([array.ctypes.data for array in self], np.int64)


@compiled
def memory_at(at: Array) -> Memory:
    """The records at these addresses."""
    return Memory(
        array_at(at[0], 1, WORK),
        array_at(at[1], 1, WEIGHTS),
        array_at(at[2], 1, TABLE),
        array_at(at[3], 1, MODEL),
        array_at(at[4], 1, RANGES),
        array_at(at[5], 1, LAST),
        array_at(at[6], 1, RECYCLED),
        array_at(at[7], 1, NEIGHBOURS),
        array_at(at[8], 1, HEADS),
        array_at(at[9], MOST_PLUGINS, PLUGIN),
        array_at(at[10], LOGS, FOLLOWERS),
        array_at(at[11], LOGS, LOG_MATCHES),
        array_at(at[12], 1, CONTEXT_MATCHES),
        array_at(at[13], 1, LANE),
    )
