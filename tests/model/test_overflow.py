"""A token that overflows the model changes no answer but its own, whatever the layout of the cache.

Masked rows are multiplied by 0, and 0 times NaN is NaN: a draft that is never accepted, or an earlier conversation,
could spoil an answer through rows that nothing is meant to read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, answers_of, request
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import generated, prompt_of
from tests.support.rehearsed import direct
from tests.support.trees import WrongDrafter

MAX_NEW_TOKENS = 24
GREEDY = SamplingConfig()
LAYOUTS: dict[str, CaptureMaker] = {"usual": never, "fixed": direct}
FAMILIES = ["llama", "gemma2", "gpt2", "mistral", "qwen3_moe", "qwen3_5", "falcon_h1", "jamba", "lfm2"]
POISON = VOCABULARY - 1


@cache
def poisoned(family: str, token: int = POISON) -> Any:
    """A model with an infinite embedding of one token, as in float16 after an overflow."""
    model = copy.deepcopy(model_of(family))
    with torch.no_grad():
        embeddings: Any = model.get_input_embeddings()
        # Tied weights would spoil the logits of every row.
        embeddings.weight = torch.nn.Parameter(embeddings.weight.clone())
        embeddings.weight[token] = torch.inf
    return model


def answer(
    target: Target, prompt: list[int], sampling: SamplingConfig = GREEDY, drafter: Drafter | None = None
) -> list[int]:
    return answer_of(target, prompt, sampling, MAX_NEW_TOKENS, drafter=drafter)


class Poisoner(WrongDrafter):
    """Also drafts a token that overflows."""

    def __init__(self, *arguments: Any, poison: int = POISON) -> None:
        super().__init__(*arguments)
        self._poison = poison

    def draft(self, context: Sequence[int]) -> DraftTree:
        tree = super().draft(context)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        return DraftTree.of(context[-1], [*tokens, self._poison], [*parents, len(tokens) // 2 - 1])


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rejected_draft_that_overflows_changes_nothing(
    family: str, layout: str, sampling: SamplingConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = prompt_of(20)
    plain = answer(Target(model_of(family), never), prompt, sampling)
    never_said = max(set(range(VOCABULARY)) - {*plain, *prompt})
    target = Target(poisoned(family, never_said), LAYOUTS[layout])
    assert answer(target, prompt, sampling) == plain and capsys.readouterr().err == ""
    for seed in range(2):
        drafter = Poisoner(len(prompt), plain, VOCABULARY - 1, seed, poison=never_said)
        assert answer(target, prompt, sampling, drafter) == plain
    assert capsys.readouterr().err.count("overflowed in float32") == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_overflow_does_not_affect_later_answers(family: str, layout: str) -> None:
    fresh = answer(Target(poisoned(family), never), prompt_of(9))
    target = Target(poisoned(family), LAYOUTS[layout])
    drafter = Hierarchy(budget=FixedBudget(16), recycled=True)
    assert answer(target, prompt_of(9), drafter=drafter) == fresh
    for length in (30, 5):  # longer and shorter than what comes after it
        answer(target, [*prompt_of(length), POISON, 3], drafter=drafter)
        assert answer(target, prompt_of(9), drafter=drafter) == fresh


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_an_overflow_of_the_answer_itself_is_decoded_as_generate_decodes_it(family: str, layout: str) -> None:
    prompt = prompt_of(20)
    token = answer(Target(model_of(family), never), prompt)[5]
    if token in prompt:
        pytest.skip("the prompt itself would overflow")
    model = poisoned(family, token)
    plain = generated(model, prompt, MAX_NEW_TOKENS)
    assert token in plain[:6] and plain[-3:] == [0, 0, 0], "what overflows must be a part of the answer"
    target = Target(model, LAYOUTS[layout])
    for seed in range(3):
        assert answer(target, prompt, drafter=WrongDrafter(len(prompt), plain, VOCABULARY, seed)) == plain


def test_a_sampled_answer_that_overflows_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="not numbers"):
        answer(Target(poisoned("llama"), direct), [3, POISON, 4], SamplingConfig(temperature=1.0))


def neighbours(prompts: Sequence[list[int]], truths: Sequence[list[int]]) -> Iterator[Request[int]]:
    """Yield requests; the drafts contain correct tokens, wrong tokens and the overflow."""
    for number, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        yield request(number, prompt, Poisoner(len(prompt), truth, VOCABULARY - 1, number) if number % 3 else None)


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_of_a_batch_are_independent(family: str, size: int) -> None:
    """Conversations that overflow, that have the largest ids and that end early, beside and before all others."""
    healthy = [prompt_of(length) for length in (7, 40, 12, 25)]
    others = [[*prompt_of(33), POISON, 2], [VOCABULARY - 2] * 11, [POISON]]
    order = [healthy[0], others[0], healthy[1], others[1], healthy[2], others[2], healthy[3]]
    target = Target(poisoned(family), never)
    alone = [answer(target, prompt) for prompt in order]
    stop = alone[3][4]  # ends the request of the largest ids early, and any other answer that contains it
    ends = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in alone]
    found = answers_of(target, neighbours(order, ends), size, MAX_NEW_TOKENS, stops={stop})
    assert found == dict(enumerate(ends))
