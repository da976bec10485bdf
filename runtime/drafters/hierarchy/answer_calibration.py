"""Corrects the probabilities of a tree's nodes according to how predictable the answer has been so far.

Learned weights change slowly and apply to all answers. Within a few steps, a factor corrects them for an answer that is
more or less predictable than the weights imply: how often its next token was drafted, relative to how often that was
expected. The functions work on a ``WORKSPACE`` record.
"""

from __future__ import annotations

from typing import Any

from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.source_names import SourceId

EXPECTED_HITS = 2.0
"""Weight of the prior of an answer's factor, in hits; low, so that the factor adapts within a few steps."""
HITS_WINDOW = 50.0
"""Number of expected hits that the factor's moving averages span."""
MAX_FACTOR = 1.5
GRAMMAR_NUMBER = SourceId.GRAMMAR.value


@compiled
def start_calibration(work: Any) -> None:
    """Reset the correction factor to 1 for a new answer, and forget the last tree."""
    work.hits[0] = work.hits[1] = EXPECTED_HITS
    work.grown = 0


@compiled
def calibrate(work: Any, nodes: int) -> None:
    """Store calibrated probabilities of a tree's nodes, or the original ones if a grammar forces the first token."""
    is_certain = nodes > 0 and work.sources[1] == GRAMMAR_NUMBER
    work.grown = 0 if is_certain else nodes
    factor = 1.0 if is_certain else min(MAX_FACTOR, work.hits[0] / work.hits[1])
    for node in range(nodes):
        work.calibrated[node] = min(1.0, work.probs[node + 1] * factor)


@compiled
def count_hit(work: Any, token: int) -> None:
    """Record whether the last tree had ``token`` as a child of the root, even if that node was not verified."""
    hit = expected = 0.0
    for node in range(1, work.grown + 1):
        if work.parents[node] == 0:
            expected += work.probs[node]
            if work.tokens[node] == token:
                hit = 1.0
    work.grown = 0
    decay = 1.0 - min(1.0, expected / HITS_WINDOW)
    # The prior does not decay.
    work.hits[0] = EXPECTED_HITS + (work.hits[0] - EXPECTED_HITS) * decay + hit
    work.hits[1] = EXPECTED_HITS + (work.hits[1] - EXPECTED_HITS) * decay + expected
