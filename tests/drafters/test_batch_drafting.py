"""The requests of a batch draft together what each would draft alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hdtool.builders.stores.build_stores import build_corpus_index
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data.documents import Document, InputFile
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, NoDraft, draft_many
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy import hierarchy
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.tree_growth import grow_all
from hdtool.runtime.drafters.published.lookup_methods import PromptLookup
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.stores.corpus_index import CorpusIndex

PROMPTS = [[1, 2, 3, 4, 1, 2], [5, 6, 5, 7, 5], [8, 9, 8, 9, 8], [4, 3, 2, 4, 3]]


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusIndex:
    mark = TokenizerFingerprint("test", 20)
    documents = [Document([1, 2, 9, 5, 7, 3, 8, 9, 6, 4, 3, 1])] * 3
    build_corpus_index(tmp_path, documents, mark, [InputFile("test", "")], executor=BuildExecutor(1))
    return CorpusIndex(tmp_path, mark)


def drafters_with(corpora: Sequence[CorpusIndex | None], budgets: Sequence[int]) -> list[Drafter]:
    made: list[Drafter] = [
        Hierarchy(corpus=corpus, budget=FixedBudget(most)) for corpus, most in zip(corpora, budgets, strict=True)
    ]
    for drafter, prompt in zip(made, PROMPTS, strict=True):
        drafter.begin(prompt)
    return made


def in_lists(trees: Sequence[DraftTree]) -> list[tuple[int, list[int], list[int], list[int]]]:
    return [(tree.root, tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()) for tree in trees]


@pytest.mark.parametrize("has_corpus", [True, False])
@pytest.mark.parametrize("budgets", [(8, 8, 8, 8), (0, 3, 64, 1)])
def test_trees_are_those_of_each_alone(corpus: CorpusIndex, budgets: tuple[int, ...], has_corpus: bool) -> None:
    together, alone = (drafters_with([corpus if has_corpus else None] * 4, budgets) for _ in range(2))
    contexts = [list(prompt) for prompt in PROMPTS]
    for _ in range(6):
        found = draft_many(together, contexts)
        expected = [drafter.draft(context) for drafter, context in zip(alone, contexts, strict=True)]
        assert in_lists(found) == in_lists(expected)
        for place, tree in enumerate(found):
            accepted = Accepted([0], [int(tree.tokens[0]), 2]) if len(tree) else Accepted([], [3])
            for drafters in (together, alone):
                drafters[place].observe(accepted, Verified(torch.empty(len(tree) + 1, 0)))
            contexts[place] += accepted.tokens


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trees were grown at once."""
    found: list[int] = []

    def noted(at: Array, most: Array, grown: Array) -> None:
        if len(most) > 1:  # one is grown where a drafter is made
            found.append(len(most))
        grow_all(at, most, grown)

    monkeypatch.setattr(hierarchy, "grow_all", noted)
    return found


def test_those_of_other_kinds_draft_alone(corpus: CorpusIndex, sizes: list[int]) -> None:
    drafters = drafters_with([corpus, None, corpus, corpus], (8, 8, 8, 8))
    drafters[2] = PromptLookup()
    drafters[2].begin(PROMPTS[2])
    found = draft_many(drafters, PROMPTS)
    assert sizes == [3]
    alone = drafters_with([corpus, None, corpus, corpus], (8, 8, 8, 8))
    expected = [drafter.draft(prompt) for drafter, prompt in zip(alone, PROMPTS, strict=True)]
    for place in (0, 1, 3):
        assert in_lists([found[place]]) == in_lists([expected[place]])
    assert len(found[2]), "prompt lookup found what the prompt repeats"


def test_drafters_without_an_index_draft_together(sizes: list[int]) -> None:
    draft_many(drafters_with([None] * 4, (8, 8, 8, 8)), PROMPTS)
    assert sizes == [4]


def test_a_batch_of_plain_requests_has_bare_trees() -> None:
    assert [len(tree) for tree in draft_many([NoDraft(), NoDraft()], PROMPTS[:2])] == [0, 0]
