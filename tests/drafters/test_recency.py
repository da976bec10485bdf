"""Recency: a token that the conversation had lately is more probable than one that it never had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hdtool.builders.stores.build_stores import build_model_store
from hdtool.data.documents import Document, InputFile
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.token_probabilities import DISTANCE_CLASSES, distance_class
from hdtool.runtime.stores.model_store import ModelStore

NEW, OLD, LAST = 5, 6, 9


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """After its last token, two tokens are equally frequent."""
    mark = TokenizerFingerprint("test", 20)
    documents = [Document([LAST, token, 11, 12, 13, 14]) for token in (NEW, OLD)] * 4
    build_model_store(tmp_path, documents, mark, [InputFile("test", "")], top_k=9, per_key=9)
    return ModelStore(tmp_path, mark)


def probs_after(prompt: list[int], store: ModelStore, *, context: bool = True) -> dict[int, float]:
    """The probability of each token after a prompt."""
    hierarchy = Hierarchy(store, context=context, budget=FixedBudget(8))
    hierarchy.begin(prompt)
    tree = hierarchy.draft(prompt)
    first = np.flatnonzero(tree.parents < 0)
    return dict(zip(tree.tokens[first].tolist(), hierarchy.probs[first].tolist(), strict=True))


def test_a_token_that_the_conversation_had_is_more_probable(store: ModelStore) -> None:
    without = probs_after([1, 2, LAST], store)
    assert without[NEW] == pytest.approx(without[OLD])
    having = probs_after([1, OLD, 2, 3, 4, LAST], store)
    assert having[OLD] > 1.5 * having[NEW]
    assert sum(having.values()) == pytest.approx(sum(without.values())), "recency moves probability, it adds none"


def test_without_the_conversation_as_a_source_there_is_no_recency(store: ModelStore) -> None:
    having = probs_after([1, OLD, 2, 3, 4, LAST], store, context=False)
    assert having[NEW] == pytest.approx(having[OLD])


def test_distances_have_classes_by_doubling() -> None:
    assert [distance_class(n) for n in (1, 2, 3, 4, 7, 8, 1023, 1024, 10**6)] == [1, 2, 2, 3, 3, 4, 10, 11, 11]
    assert distance_class(10**9) == DISTANCE_CLASSES - 1
