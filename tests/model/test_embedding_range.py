"""Tokens that a tokenizer has and the model cannot embed: never verified, and refused in a prompt."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given

from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import ModelError, PromptError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.decoding import METHODS, TRAINED, DecodeConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, answers_of, request
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import prompt_of
from tests.support.rehearsed import direct
from tests.support.trees import check_integrity, path_to, trees

MAX_NEW_TOKENS = 24
PAD = VOCABULARY
"""Ids that the tokenizer has and the model does not: this one, and the one after it."""
TOKENIZER = TokenizerFingerprint("0123", VOCABULARY + 2)


def answer(target: Target, prompt: list[int], drafter: Drafter | None = None) -> list[int]:
    return answer_of(target, prompt, max_new_tokens=MAX_NEW_TOKENS, drafter=drafter)


@pytest.fixture(scope="module")
def store_set(tmp_path_factory: pytest.TempPathFactory) -> StoreSet:
    """Stores in which a token without an embedding is the most frequent one after each token of the answer."""
    prompt = prompt_of(20)
    said = answer(Target(model_of("llama"), never), prompt)
    text = [*prompt, *said]
    spoilt = [piece for place in range(1, len(text)) for piece in (*text[max(0, place - 6) : place], PAD, PAD + 1)]
    documents = [Document(np.array(ids)) for ids in (spoilt, spoilt, text)]
    folder, source = tmp_path_factory.mktemp("stores"), [InputFile("answers.jsonl", "ab" * 32)]
    build_model_store(folder / "model", documents, TOKENIZER, source)
    build_corpus_index(folder / "corpus", documents, TOKENIZER, source)
    return StoreSet(ModelStore(folder / "model"), CorpusIndex(folder / "corpus"))


@pytest.mark.parametrize("layout", [never, direct], ids=["usual", "fixed"])
@pytest.mark.parametrize("method", [name for name in METHODS if name not in TRAINED])
@pytest.mark.each_value
def test_no_method_drafts_a_token_without_an_embedding(method: str, layout: CaptureMaker, store_set: StoreSet) -> None:
    prompt = prompt_of(20)
    plain = answer(Target(model_of("llama"), never), prompt)
    target = Target(model_of("llama"), layout)
    drafter = drafter_with_budget(lambda: FixedBudget(16), DecodeConfig(method=method), store_set, target)
    for _ in range(2):
        assert answer(target, prompt, drafter) == plain
    assert answers_of(target, [request(0, prompt, drafter)], 1, MAX_NEW_TOKENS) == {0: plain}


@given(trees(2 * VOCABULARY, max_nodes=30))
def test_nodes_with_an_ancestor_without_an_embedding_are_dropped(tree: DraftTree) -> None:
    left = tree.within(len(tree), VOCABULARY)
    check_integrity(left)
    wanted = [
        [int(tree.tokens[above]) for above in path_to(tree, node)]
        for node in range(len(tree))
        if all(tree.tokens[above] < VOCABULARY for above in path_to(tree, node))
    ]
    assert [[int(left.tokens[above]) for above in path_to(left, node)] for node in range(len(left))] == wanted
    if len(wanted) == len(tree):
        assert left is tree, "nothing is copied where all is well"


def test_negative_ids_have_no_embedding_either() -> None:
    tree = DraftTree.of(1, [5, -1, 7, 8], [ROOT, ROOT, 1, 0]).within(4, VOCABULARY)
    assert tree.tokens.tolist() == [5, 8] and tree.parents.tolist() == [ROOT, 0]


@pytest.mark.parametrize("prompt", [[3, PAD, 4], [2**40], [-1, 5]])
def test_a_prompt_with_such_a_token_is_refused_by_name(prompt: list[int]) -> None:
    with pytest.raises(
        PromptError, match=rf"the prompt holds token .*embeddings for tokens 0 to {VOCABULARY - 1} only"
    ):
        answer(Target(model_of("llama"), never), prompt)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        answer(Target(model_of("llama"), never), [])


def test_an_answer_cannot_continue_after_another_has_started() -> None:
    """One target holds one conversation: going on would read the other's rows of the KV cache."""
    target, prompt = Target(model_of("llama"), never), prompt_of(8)
    first = decode(target, prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=MAX_NEW_TOKENS)
    next(first)
    plain = answer(target, prompt)
    with pytest.raises(ModelError, match="another conversation began on this model"):
        next(first)
    assert answer(target, prompt) == plain


def test_an_answer_that_is_refused_during_a_step_of_another_leaves_that_one_alone() -> None:
    target, prompt = Target(model_of("llama"), never), prompt_of(8)
    plain = answer(target, prompt)
    first = decode(target, prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=MAX_NEW_TOKENS)
    said = list(next(first).tokens)
    with target.busy, pytest.raises(ModelError, match="two threads use one model"):
        answer(target, prompt)
    assert said + [token for step in first for token in step.tokens] == plain


def test_two_threads_in_one_model_get_an_error_and_no_mixed_answer() -> None:
    target, prompts = Target(model_of("llama"), never), [prompt_of(8), prompt_of(31)]
    expected = [answer(target, prompt) for prompt in prompts]
    outcomes: list[tuple[int, list[int] | str]] = []

    def ask(number: int) -> None:
        for _ in range(10):
            try:
                outcomes.append((number, answer(target, prompts[number])))
            except ModelError as error:
                outcomes.append((number, str(error)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 20
    for number, outcome in outcomes:
        if isinstance(outcome, str):
            assert "two threads use one model" in outcome or "another conversation began" in outcome
        else:
            assert outcome == expected[number]
