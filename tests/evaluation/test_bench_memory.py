"""Contenders of a benchmark keep nothing of other questions and rounds, unless warm ones are chosen."""

from __future__ import annotations

from typing import Any

import pytest

from hdtool.builders.evaluation.bench import Bench
from hdtool.builders.evaluation.bench_plan import ContenderFactory
from hdtool.builders.evaluation.contenders import Contender, GenerateContender
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import interleave_categories, read_prompts
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from tests.support.methods import DEMO_METHODS

IN_SHORT = ("hd+logitspec", "lade", "amphista")
"""One method for each kind of memory: sources and rankings, a pool of n-grams, heads that pause."""
RARELY = ("pld", "rest", "medusa")
"""Methods without a memory, or with that of another one, as what drafts beside the sources of ``hd`` has."""
METHODS_THAT_DRAFT = [
    pytest.param(
        name,
        marks=()
        if name in IN_SHORT
        else pytest.mark.exhaustive
        if name in RARELY or name.startswith("hd+")
        else pytest.mark.long,
    )
    for name in DEMO_METHODS
    if name != "ar"
]


@pytest.fixture(scope="module")
def all_methods(embedded: Loaded) -> ContenderFactory:
    """All methods with the demo's stores and heads; a fixed number of nodes, so that no time decides on a tree."""
    stores = StoresConfig(model_db=str(demo.MODEL_STORE), corpus_db=str(demo.CORPUS_INDEX))
    decoding = DecodeConfig(draft_tokens=8, max_new_tokens=32, drafter=str(demo.MODEL))
    store_set = StoreSet.for_tokenizer(embedded.tokenizer, stores)
    return ContenderFactory(embedded, store_set, ModelConfig(), decoding, SamplingConfig())


@pytest.mark.parametrize("name", METHODS_THAT_DRAFT)
@pytest.mark.one_in(2)
def test_nothing_learned_before_shows_in_cold_answers(
    embedded: Loaded, all_methods: ContenderFactory, name: str
) -> None:
    """Neither an earlier question, nor the warm-up, nor an earlier round changes a tree or what is accepted of it."""
    first, second, third = interleave_categories(read_prompts(demo.PROMPTS), 3)

    noted: list[tuple[int, list[int], list[int]]] = []
    """Nodes, tokens of each step and their sources, of each answer."""

    class Noted(Bench):
        def _answered(self, *given: Any) -> list[AnsweredTurn]:
            found = super()._answered(*given)
            noted.extend((turn.nodes, turn.step_tokens, turn.drafted_by) for turn in found)
            return found

    def bench(rounds: int = 1) -> Bench:
        return Noted(embedded, all_methods.contenders([name]), 32, rounds=rounds)

    list(bench().answers([third]))
    (alone,) = noted
    after_others = bench(rounds=2)
    after_others.warm_up([first, third])
    list(after_others.answers([first, second, third]))
    assert len(noted) == 1 + 2 + 2 * 3 and noted[-2:] == [alone, alone]


@pytest.mark.parametrize("name", ["hd", "hd+logitspec", "logitspec", "hd+amphista"])
def test_a_drafter_that_is_kept_would_show(embedded: Loaded, all_methods: ContenderFactory, name: str) -> None:
    """The methods that learn: what the test above compares does change if their drafter answers again."""
    contender = all_methods.contenders([name])[name]
    ids = encode_conversation(embedded.tokenizer, read_prompts(demo.PROMPTS)[0].messages)
    first, again = (contender.answer(ids) for _ in range(2))
    assert (first.nodes, first.step_tokens, first.drafted_by) != (again.nodes, again.step_tokens, again.drafted_by)
    fresh = contender.fresh().answer(ids)
    assert (first.nodes, first.step_tokens, first.drafted_by) == (fresh.nodes, fresh.step_tokens, fresh.drafted_by)


def test_a_draft_model_forgets_as_well(embedded: Loaded) -> None:
    """Some schedules of transformers keep the number of draft tokens in the settings of the draft model."""
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=24), SamplingConfig())
    contender = lineup.contenders(["generate-assisted"], str(demo.MODEL))["generate-assisted"]
    assert isinstance(contender, GenerateContender)
    for settings in (contender._begun, contender._learned):
        settings.num_assistant_tokens_schedule, settings.num_assistant_tokens = "heuristic", 3
    ids = embedded.tokenizer("def add(a, b):")["input_ids"]

    def drafted(contender: Contender) -> int:
        contender.answer(ids)
        assert isinstance(contender, GenerateContender)
        return int(contender._learned.num_assistant_tokens)

    kept, other = contender.fresh(), contender.fresh()
    once, twice = drafted(kept), drafted(kept)
    assert 3 < once < twice
    assert drafted(other) == drafted(kept.fresh()) == once
