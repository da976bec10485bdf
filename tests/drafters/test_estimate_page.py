"""The example on the page about the estimate: the drafter computes its numbers."""

from __future__ import annotations

import pytest
import torch

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.token_probabilities import MANY_TOKENS, evidence_bucket
from hdtool.runtime.settings.draft_sources import SourceId
from tests.support.project import ROOT

CONVERSATION = [1, 2, 3, 1, 2, 4, 1, 2]
UNSEEN = 1 / 32_000


def test_the_example_is_what_the_drafter_computes() -> None:
    page = (ROOT / "docs" / "concepts" / "estimate.md").read_text(encoding="utf-8")
    example = page[page.index("## An example") :]
    shown: list[float] = []

    def on_page(number: float) -> float:
        assert f"{number:.4f}" in example
        shown.append(number)
        return number

    assert f"`{' '.join(map(str, CONVERSATION))}`" in example
    hierarchy, bucket = Hierarchy(budget=FixedBudget(2)), evidence_bucket(2, MANY_TOKENS)
    hierarchy.begin(CONVERSATION)
    weight = on_page(float(hierarchy.weights(SourceId.CONTEXT)[1, bucket]))
    second = on_page(weight / 2)
    left = on_page(1 - weight)
    first = on_page(left * weight / 2)
    rest = on_page(left * (1 - weight))
    whole = on_page(second + first)
    gained = [whole * gain for gain in (0.78, 0.74)]
    expected = [on_page(2 * whole * one / sum(gained)) for one in gained]
    tree = hierarchy.draft(CONVERSATION)
    assert tree.tokens.tolist() == [4, 3] and tree.parents.tolist() == [-1, -1]
    assert hierarchy.probs == pytest.approx(expected, rel=1e-9)
    estimate = on_page(whole + rest * UNSEEN)
    credit = on_page(second / estimate)
    on_page(first / estimate)
    on_page(1 - credit)
    hierarchy.observe(Accepted([], [4]), Verified(torch.empty(0)))
    hierarchy.draft([*CONVERSATION, 4])
    learned = hierarchy.weights(SourceId.CONTEXT)[:2, bucket]
    assert learned[1] == pytest.approx((20 * weight + credit) / 21, rel=1e-9)
    assert learned[0] == pytest.approx((20 * weight + first / estimate) / (21 - credit), rel=1e-9)
    for number in learned.tolist():
        on_page(number)
    assert len(shown) == 14
