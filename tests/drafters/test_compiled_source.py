"""A compiled source from outside the package: one file with its functions, and one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.hierarchy.compiled_source import RESTART, CompiledSource, Prior, record_at, work_at
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.token_probabilities import contribute
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS

NUMBER = SourceId.LOOKAHEAD.value
COUNTER = np.dtype([("emitted", np.int64), ("restarts", np.int64), ("token", np.int64, 1), ("count", np.int64, 1)])


def find(records_at: int, node: int) -> int:
    """The next number follows every number."""
    counter, work = record_at(records_at, NUMBER, COUNTER), work_at(records_at)
    counter.token[0] = work.tails[node, MAX_MATCH_TOKENS - 1] + 1
    return 2


def weigh(records_at: int, node: int, order: int, first: int, left: float) -> float:
    counter = record_at(records_at, NUMBER, COUNTER)
    return contribute(records_at, NUMBER, first, counter.token, counter.count, 1, 0, left)


def move(records_at: int, token: int, emitted: int) -> None:
    counter = record_at(records_at, NUMBER, COUNTER)
    counter.emitted += emitted
    counter.restarts += token == RESTART


COUNTING = CompiledSource(SourceId.LOOKAHEAD, 2, Prior(1, 0.3, 0.5, 0.5, 0.5), find, weigh, move)


def test_it_drafts_learns_and_follows() -> None:
    record = np.zeros(1, COUNTER)
    record["count"] = 1
    hierarchy = Hierarchy(budget=FixedBudget(5), sources={COUNTING: record})
    before = hierarchy.weights(SourceId.LOOKAHEAD)[0, 0]
    restarts = int(record["restarts"][0])
    hierarchy.begin([900, 500, 7])
    tree = hierarchy.draft([900, 500, 7])
    assert tree.tokens.tolist()[:3] == [8, 9, 10]
    assert set(tree.sources.tolist()) == {NUMBER}
    assert hierarchy.probs[:2] == pytest.approx([before, before**2])
    hierarchy.observe(Accepted([0, 1], [8, 9, 10]), Verified(torch.empty(0)))
    hierarchy.draft([900, 500, 7, 8, 9, 10])
    assert hierarchy.weights(SourceId.LOOKAHEAD)[0, 0] > before, "it was right"
    assert record["emitted"][0] == 3 and record["restarts"][0] == restarts + 1


def test_the_sources_of_the_package_come_after_it() -> None:
    record = np.zeros(1, COUNTER)
    record["count"] = 1
    hierarchy = Hierarchy(budget=FixedBudget(8), sources={COUNTING: record})
    context = [5, 90, 5, 91, 5]
    hierarchy.begin(context)
    tree = hierarchy.draft(context)
    assert {6, 90} <= set(tree.tokens[tree.parents < 0].tolist())
    assert {NUMBER, SourceId.CONTEXT.value} <= set(tree.sources.tolist())
