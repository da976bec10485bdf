"""Rollouts: prompts that are asked again are drafted for from their earlier answers, and samples stay as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.generate_request import MAX_ANSWERS, TAIL, Rollouts
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.oracle import prompt_of

SAMPLES, MAX_NEW_TOKENS, LENGTHS = 3, 40, (12, 7)
WIDTH = max(LENGTHS)


def hierarchy(target: Target) -> Hierarchy:
    return Hierarchy(budget=FixedBudget(12), context=False)


def batch(**options: Any) -> dict[str, Any]:
    """Two prompts, padded on the left, of each of which several samples are taken."""
    ids, mask = torch.zeros(2, len(LENGTHS), WIDTH, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, WIDTH - length :], mask[row, WIDTH - length :] = torch.tensor(prompt_of(length)), 1
    sampled = {"do_sample": True, "num_return_sequences": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": 0}
    return {"input_ids": ids, "attention_mask": mask, **sampled, **options}


def test_samples_are_the_same_in_every_epoch_and_take_fewer_passes() -> None:
    model: Any = model_of("llama")
    keeping, forgetting = Generator(hierarchy, rollouts=10_000), Generator(hierarchy)
    passes = []
    for _ in range(2):
        expected = model.generate(**batch(), custom_generate=Generator(), seed=3)
        assert torch.equal(model.generate(**batch(), custom_generate=forgetting, seed=3), expected)
        assert torch.equal(model.generate(**batch(), custom_generate=keeping, seed=3), expected)
        passes.append((keeping.stats.steps, forgetting.stats.steps))
    (first, first_without), (second, second_without) = passes
    assert first == first_without == second_without, "nothing is known of prompts that were never asked"
    assert second < first / 3
    assert keeping.stats.accepted_prediction_tokens > 0


def test_other_seeds_and_changed_weights_draw_their_own_samples() -> None:
    model: Any = model_of("llama")
    keeping = Generator(hierarchy, rollouts=10_000)
    for seed in (3, 50):
        for temperature in (0.7, 0.05):
            asked = batch(temperature=temperature, seed=seed)
            expected = model.generate(**asked, custom_generate=Generator())
            assert torch.equal(model.generate(**asked, custom_generate=keeping), expected)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    expected = model.generate(**batch(seed=50), custom_generate=Generator())
    assert torch.equal(model.generate(**batch(seed=50), custom_generate=keeping), expected)


def test_a_given_prediction_counts_beside_rollouts() -> None:
    model: Any = model_of("llama")
    keeping = Generator(hierarchy, rollouts=10_000)
    expected = model.generate(**batch(seed=3), custom_generate=keeping)
    predicted = expected[:, WIDTH:].tolist()
    later = model.generate(**batch(seed=90), custom_generate=Generator())
    found = model.generate(**batch(seed=90), custom_generate=keeping, prediction=later[:, WIDTH:].tolist())
    assert torch.equal(found, later)
    assert keeping.stats.steps < keeping.stats.tokens / 2
    assert torch.equal(model.generate(**batch(seed=3), custom_generate=keeping, prediction=predicted), expected)


def test_a_drafter_without_predictions_is_refused() -> None:
    model: Any = model_of("llama")
    with pytest.raises(OptionError, match=r"made of rollouts.* does not use one"):
        model.generate(**batch(), custom_generate=Generator(rollouts=100))
    with pytest.raises(OptionError, match=r"rollouts is -1, .*give 0 or more"):
        Generator(rollouts=-1)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    none = StoresConfig("none", "none")
    refused = Generator.drafting(tokenizer, DecodeConfig(method="pld"), none, rollouts=100)
    with pytest.raises(OptionError, match="does not use one"):
        model.generate(**batch(), custom_generate=refused)


class TestBounds:
    def test_the_prompt_that_was_asked_longest_ago_goes_first(self) -> None:
        kept = Rollouts(10)
        for prompt in ([1], [2]):
            kept.add(prompt, [7] * 4)
        assert kept.prediction([1]) == [7] * 4
        kept.add([3], [8] * 4)
        assert (kept.tokens, len(kept)) == (8, 2)
        assert kept.prediction([2]) == []
        assert kept.prediction([1]) == [7] * 4

    def test_the_oldest_answer_of_a_prompt_goes_first(self) -> None:
        kept = Rollouts(10_000)
        for answer in range(MAX_ANSWERS + 2):
            kept.add([1], [answer])
        assert kept.tokens == MAX_ANSWERS
        assert kept.prediction([1])[::2] == list(range(2, MAX_ANSWERS + 2))

    def test_an_answer_longer_than_all_that_is_kept_is_cut(self) -> None:
        kept = Rollouts(3)
        kept.add([1], [5, 6, 7, 8])
        assert kept.prediction([1]) == [5, 6, 7]
        kept.add([1], [])
        assert (kept.tokens, len(kept)) == (3, 1)

    def test_nothing_is_kept_without_room(self) -> None:
        kept = Rollouts(0)
        kept.add([1], [2])
        assert not kept
        assert kept.prediction([1], [4]) == [4]

    def test_each_answer_follows_the_end_of_the_prompt(self) -> None:
        kept, prompt = Rollouts(100), list(range(20))
        kept.add(prompt, [30, 31])
        kept.add(prompt, [40])
        tail = prompt[-TAIL:]
        assert kept.prediction(prompt, [50]) == [30, 31, *tail, 40, *tail, 50]
