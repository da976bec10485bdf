"""Trained drafters as a source: rankings of the next token by position, or by the path down to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.config import MOST_HEADS
from hdtool.runtime.drafters.hierarchy.candidates import contribute
from hdtool.runtime.drafters.hierarchy.evidence import BEFORE_ORDER, MILLION
from hdtool.runtime.drafters.hierarchy.memory import RESTART, Prior, Source, record_at, work_at
from hdtool.runtime.drafters.hierarchy.weights import bucket_of_share
from hdtool.runtime.drafters.trained.proposal import BEST, MOST_RANKINGS, NONE, Proposal
from hdtool.runtime.kernels.clock import lap
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import ROWS

AT = SourceName.HEADS.value
ROWS_OF_WEIGHTS = MOST_HEADS
"""Rankings further ahead share the last row."""

PROPOSED = np.dtype(
    [
        ("source", np.int64),
        ("root", np.int64),  # the ranking that follows the root, or NONE
        ("of_node", np.int64, ROWS),  # the ranking that follows each node of the tree, or NONE
        ("tokens", np.int64, (MOST_RANKINGS, BEST)),
        ("shares", np.int64, (MOST_RANKINGS, BEST)),
        ("after", np.int64, (MOST_RANKINGS, BEST)),
        ("after_others", np.int64, MOST_RANKINGS),
        ("depths", np.int64, MOST_RANKINGS),
    ],
    align=True,
)


def no_proposal() -> Array:
    """The record before anything was proposed."""
    record = np.zeros(1, PROPOSED)
    record["source"], record["root"] = SourceName.HEADS, NONE
    return record


def note_proposal(record: Any, source: SourceName, proposal: Proposal) -> None:
    """Store what a trained drafter proposes for the root and the paths below it."""
    record["source"], record["root"] = source, 0 if len(proposal.tokens) else NONE
    number, best = proposal.tokens.shape
    record["tokens"][:number], record["shares"][:number] = NONE, 0
    record["tokens"][:number, :best], record["shares"][:number, :best] = proposal.tokens, proposal.probs * MILLION
    record["after"][:number, :best] = proposal.after
    record["after_others"][:number], record["depths"][:number] = proposal.after_others, proposal.depths


@compiled
def _proposed_at(at: int) -> Any:
    return record_at(at, AT, PROPOSED)


@compiled
def ranking_after(record: Any, ranking: int, token: int) -> int:
    """The ranking that follows a token of another ranking, or NONE."""
    if ranking == NONE:
        return NONE
    for place in range(BEST):
        if record.tokens[ranking, place] == token:
            return int(record.after[ranking, place])
    return int(record.after_others[ranking])


def _find(at: int, node: int) -> int:
    work, record = work_at(at), _proposed_at(at)
    if node == 0:
        record.of_node[0] = record.root
    else:
        record.of_node[node] = ranking_after(record, record.of_node[work.parents[node]], work.tokens[node])
    return BEFORE_ORDER if record.of_node[node] != NONE else -1


def _weigh(at: int, node: int, _: int, first: int, left: float) -> float:
    work, record = work_at(at), _proposed_at(at)
    ranking = record.of_node[node]
    tokens, shares = record.tokens[ranking], record.shares[ranking]
    row, bucket = first + min(record.depths[ranking], ROWS_OF_WEIGHTS - 1), bucket_of_share(shares[0], MILLION)
    left = contribute(at, record.source, row, tokens, shares, MILLION, bucket, left)
    lap(work, record.source)
    return left


def _move(at: int, token: int, emitted: int) -> None:
    record = _proposed_at(at)
    record.root = NONE if token == RESTART else ranking_after(record, record.root, token)


TRAINED = Source(SourceName.HEADS, BEFORE_ORDER, Prior(ROWS_OF_WEIGHTS, 0.5, 0.85), _find, _weigh, _move)
