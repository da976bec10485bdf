"""Batches of ``generate`` and several samples of one prompt: each row as if it had been asked for alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TextStreamer

from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.sampler import seed_of
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.generate_request import UnsupportedCallError
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.target.target import Target
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import prompt_of

LENGTHS = (20, 9, 30)
WIDTH, MAX_NEW_TOKENS = max(LENGTHS), 25


def hierarchy(target: Target) -> Hierarchy:
    return Hierarchy(budget=FixedBudget(12), last=True, recycled=True)


def batch() -> dict[str, Any]:
    """Prompts of several lengths, padded on the left."""
    ids, mask = torch.zeros(2, len(LENGTHS), WIDTH, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, WIDTH - length :], mask[row, WIDTH - length :] = torch.tensor(prompt_of(length)), 1
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": 0}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_batch_gets_the_tokens_of_the_library(family: str) -> None:
    model: Any = model_of(family)
    generator, asked = Generator(hierarchy), {**batch(), "do_sample": False}
    expected = model.generate(**asked)
    assert torch.equal(model.generate(**asked, custom_generate=generator), expected)
    ends = [int(expected[0, WIDTH + 7]), int(expected[2, WIDTH + 3])]
    expected = model.generate(**asked, eos_token_id=ends)
    found = model.generate(**asked, eos_token_id=ends, custom_generate=generator)
    assert torch.equal(found, expected), "rows that end are padded as the library pads them"
    assert generator.stats.tokens == int((found[:, WIDTH:] != 0).sum())


def test_a_sampled_row_is_the_answer_to_its_prompt_with_its_seed() -> None:
    model: Any = model_of("llama")
    generator = Generator(hierarchy)
    prompt = torch.tensor([prompt_of(12)])
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.8,
        "max_new_tokens": MAX_NEW_TOKENS,
        "pad_token_id": 0,
    }
    rows = model.generate(prompt, **options, num_return_sequences=4, custom_generate=generator, seed=5)
    assert rows.shape == (4, 12 + MAX_NEW_TOKENS)
    for row in range(4):
        alone = model.generate(prompt, **options, custom_generate=Generator(), seed=seed_of(5, row) % 2**63)
        assert torch.equal(rows[row], alone[0])
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_the_prompt_of_several_samples_is_read_once() -> None:
    model: Any = model_of("llama")
    generator = Generator(hierarchy)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 4, "pad_token_id": 0}
    model.generate(torch.tensor([prompt_of(40)]), **options, num_return_sequences=3, custom_generate=generator)
    assert generator.stats.cached_tokens == 2 * (40 - 2)


def test_scores_and_logits_are_those_of_the_library_and_zero_after_the_end() -> None:
    model: Any = model_of("llama")
    asked = {**batch(), "do_sample": False}
    end = int(model.generate(**asked)[0, WIDTH + 7])
    asked |= {"eos_token_id": end, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = model.generate(**asked), model.generate(**asked, custom_generate=Generator(hierarchy))
    assert len(found.scores) == len(expected.scores) == len(found.logits)
    ended = torch.zeros(len(LENGTHS), dtype=torch.bool)
    for place, (mine, theirs) in enumerate(zip(found.scores, expected.scores, strict=True)):
        torch.testing.assert_close(mine[~ended], theirs[~ended], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.logits[place][~ended], expected.logits[place][~ended], atol=1e-4, rtol=1e-4)
        assert not mine[ended].any()
        ended |= expected.sequences[:, WIDTH + place] == end
    assert ended.any()


def test_processors_and_criteria_see_their_own_row() -> None:
    model: Any = model_of("llama")
    asked = {**batch(), "do_sample": False}

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [row + 1, row + 2, (int(ids[-1]) + row) % VOCABULARY]

    def long_enough(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([bool(row[-1] % 7 == 0) for row in ids])

    options: dict[str, Any] = {"prefix_allowed_tokens_fn": allowed, "repetition_penalty": 1.3}
    options |= {"stopping_criteria": [long_enough]}
    expected = model.generate(**asked, **options)
    assert torch.equal(model.generate(**asked, **options, custom_generate=Generator(hierarchy)), expected)


def test_each_row_drafts_from_its_own_prediction() -> None:
    model: Any = model_of("llama")
    asked = {**batch(), "do_sample": False}
    expected = model.generate(**asked)
    answers = expected[:, WIDTH:].tolist()
    for prediction in (answers, expected[:, WIDTH:]):
        generator = Generator(hierarchy)
        found = model.generate(**asked, custom_generate=generator, prediction=prediction)
        assert torch.equal(found, expected)
        assert generator.stats.accepted_prediction_tokens > len(LENGTHS)


def test_what_cannot_be_batched_is_named() -> None:
    model: Any = model_of("llama")
    asked = {**batch(), "do_sample": False}
    with pytest.raises(OptionError, match="each row needs its own: give the Generator a function"):
        model.generate(**asked, custom_generate=Generator(Hierarchy(budget=FixedBudget(4))))
    streamer: Any = TextStreamer(None)  # type: ignore[arg-type]
    streamer.put = streamer.end = lambda *_: None
    with pytest.raises(UnsupportedCallError, match="a streamer is given"):
        model.generate(**asked, custom_generate=Generator(hierarchy), streamer=streamer)
    with pytest.raises(UnsupportedCallError, match=r"UnbatchedClassifierFreeGuidance.* has a state of all rows"):
        model.generate(**asked, custom_generate=Generator(hierarchy), guidance_scale=2.0)


def test_an_own_processor_is_called_with_one_row_at_a_time() -> None:
    model: Any = model_of("llama")
    shapes = set()

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shapes.add((ids.shape[0], scores.shape[0]))
        return scores

    own: Any = LogitsProcessorList([noted])
    model.generate(**batch(), do_sample=False, logits_processor=own, custom_generate=Generator(hierarchy))
    assert shapes == {(1, 1)}
