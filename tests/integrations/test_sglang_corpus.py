"""Trees for SGLang's n-gram worker, in the form of its corpus: tokens and ancestor masks of one size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hdtool.data.errors import OptionError
from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.sglang.ngram_corpus import (
    PADDING_TOKEN,
    SETTINGS_VARIABLE,
    HierarchyCorpus,
    PayingNodes,
    SglangSettings,
)
from hdtool.runtime.stores.history_store import History

NODES, VOCABULARY = 6, 100
SAID = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def corpus(history: History | None = None, vocabulary: int = VOCABULARY) -> HierarchyCorpus:
    return HierarchyCorpus(lambda: Hierarchy(budget=FixedBudget(NODES - 1), history=history), NODES, vocabulary)


def drafts(drafted: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return drafted[0].reshape(-1, NODES).tolist()


def test_a_tree_starts_at_the_last_token_and_follows_the_context() -> None:
    one = corpus()
    one.begin("a", [*SAID, 11])
    tokens, masks = one.batch_get(["a"], [[11, 12]], [len(SAID) + 2])
    assert tokens.tolist() == [12, 13, 14, 15, 16, 17]
    assert masks.reshape(NODES, NODES).tolist() == np.tril(np.ones((NODES, NODES), int)).tolist()


def test_what_nothing_is_drafted_for_is_padded_below_the_root() -> None:
    tokens, masks = corpus().batch_get(["a"], [[1, 2, 3]], [3])
    assert tokens.tolist() == [3, *[PADDING_TOKEN] * (NODES - 1)]
    expected = np.eye(NODES, dtype=int)
    expected[:, 0] = 1
    assert masks.reshape(NODES, NODES).tolist() == expected.tolist()


def test_trees_have_the_size_of_the_largest_where_sglang_takes_any() -> None:
    sizes = list[int]()
    budget = PayingNodes(NODES - 1)
    one = HierarchyCorpus(lambda: Hierarchy(budget=budget), NODES, VOCABULARY, sizes.append)
    assert one.batch_get(["a"], [[1, 2, 3]], [3])[0].tolist() == [3]
    one.begin("b", [*SAID, 11])
    tokens, masks = one.batch_get(["a", "b"], [[4], [12]], [4, len(SAID) + 2])
    nodes = len(tokens) // 2
    assert sizes == [1, nodes] and 1 < nodes <= NODES
    assert tokens[nodes:].tolist() == [12, 13, 14, 15, 16, 17][:nodes] and tokens[0] == 4
    assert masks.reshape(2, nodes, nodes)[1].tolist() == np.tril(np.ones((nodes, nodes), int)).tolist()


def test_nodes_pay_as_far_as_their_probability_exceeds_what_passes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, probs = PayingNodes(3), np.array([0.9, 0.5, 0.3, 0.2])
    monkeypatch.setattr(budget.passes, "floor", lambda requests: requests / 10)
    sizes = []
    for budget.requests in (1, 3, 4, 6, math.ceil(10 * NO_DRAFT_ABOVE)):
        sizes.append(budget.choose_size(probs))
    assert sizes == [3, 3, 2, 1, 0]


def test_requests_keep_their_contexts_in_any_order_and_batch() -> None:
    one = corpus()
    one.begin("a", [*SAID, 11])
    one.begin("b", [31, 32, 33, 34, 35, 36, 31])
    assert [tree[:3] for tree in drafts(one.batch_get(["b", "a"], [[32], [12]], [8, 12]))] == [
        [32, 33, 34],
        [12, 13, 14],
    ]
    assert drafts(one.batch_get(["a"], [[12, 13]], [13]))[0][:3] == [13, 14, 15]


def test_a_context_that_skips_tokens_begins_anew() -> None:
    one = corpus()
    one.begin("a", [*SAID, 11])
    assert drafts(one.batch_get(["a"], [[1, 2, 1]], [40]))[0][:2] == [1, 2]


def test_finished_answers_are_drafted_from_and_stay_after_a_flush() -> None:
    one = corpus(History())
    one.begin("a", [1, 2, 3])
    one.batch_get(["a"], [[11]], [4])
    one.finish("a", [1, 2, 3, *SAID])
    one.reset()
    assert "a" not in one
    assert drafts(one.batch_get(["b"], [[5, 12, 13]], [3]))[0][:4] == [13, 14, 15, 16]


def test_tokens_without_an_embedding_are_not_drafted() -> None:
    one = corpus(vocabulary=14)
    one.begin("a", [*SAID, 11])
    assert drafts(one.batch_get(["a"], [[12]], [12]))[0] == [12, 13, *[PADDING_TOKEN] * 4]


@pytest.mark.parametrize("text", ["[]", "x", '{"tokens": 1}', '{"sources": []}'])
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=SETTINGS_VARIABLE):
        SglangSettings.of({SETTINGS_VARIABLE: text})


def test_sources_from_logits_are_refused() -> None:
    with pytest.raises(OptionError, match="sources of method hd"):
        SglangSettings.of({SETTINGS_VARIABLE: '{"sources": "last-logits"}'})


def test_settings_are_read() -> None:
    settings = SglangSettings.of({SETTINGS_VARIABLE: '{"corpus_db": "none", "history": "none"}'})
    assert (settings.stores.corpus_db, settings.decoding.history) == ("none", "none")
    assert SglangSettings.of({}).decoding.history == "memory"
