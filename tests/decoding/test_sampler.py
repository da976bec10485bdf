"""Choosing a token: generate's own distribution, and choices that rounding leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.data.errors import ModelError
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.settings.model import SamplingConfig
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import prompt_of
from tests.support.samplers import processors_of, sampler_of


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
)
def test_the_distribution_is_that_of_generate(settings: dict[str, float]) -> None:
    """Replays what generate sampled: its raw logits must give its processed scores, in every step."""
    model: Any = model_of("llama")
    prompt = prompt_of(10)
    torch.manual_seed(0)
    theirs = model.generate(
        torch.tensor([prompt]), do_sample=True, max_new_tokens=20, output_logits=True, output_scores=True,
        return_dict_in_generate=True, **{"top_k": 0, **settings},
    )  # fmt: skip
    config = SamplingConfig(**settings)  # type: ignore[arg-type]
    for place, (raw, processed) in enumerate(zip(theirs.logits, theirs.scores, strict=True)):
        ids = theirs.sequences[:, : len(prompt) + place]
        torch.testing.assert_close(processors_of(config)(ids, raw.float()), processed)


def test_choices_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.0, 0.3]]).log()
    counts = np.zeros(4)
    for seed in range(4000):
        counts[Sampler(SamplingConfig(temperature=1.0, seed=seed), [0]).chooser(logits)(0)] += 1
    assert counts[2] == 0
    np.testing.assert_allclose(counts / counts.sum(), [0.5, 0.2, 0.0, 0.3], atol=0.03)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.lists(st.floats(-8, 8), min_size=1, max_size=50))
def test_the_choice_is_the_argmax_of_the_perturbed_scores(seed: int, position: int, scores: list[float]) -> None:
    for temperature in (0.0, 1.0):
        sampler = sampler_of(SamplingConfig(temperature=temperature, seed=seed), [0] * position)
        logits = torch.tensor(scores)
        assert sampler.choose(logits) == int(sampler.perturbed_scores(logits).argmax())


def test_rounding_rarely_changes_a_choice() -> None:
    """Thousands of tokens, as wrong as another number of rows makes them: the very borders must not matter."""
    torch.manual_seed(0)
    changed = 0
    for position in range(2000):
        scores = torch.randn(5000)
        sampler = Sampler(SamplingConfig(temperature=1.0), [0] * position)
        changed += sampler.choose(scores) != sampler.choose(scores + 1e-5 * torch.randn(5000))
    assert changed <= 1


def test_settings_that_change_nothing_have_no_processor() -> None:
    def kinds(config: SamplingConfig) -> list[str]:
        return [type(processor).__name__ for processor in processors_of(config)]

    assert kinds(SamplingConfig()) == kinds(SamplingConfig(top_k=5, top_p=0.5)) == []
    assert kinds(SamplingConfig(temperature=1.0, top_k=20, top_p=0.8, repetition_penalty=1.1)) == [
        "RepetitionPenaltyLogitsProcessor", "TopKLogitsWarper", "TopPLogitsWarper",
    ]  # fmt: skip
    off = SamplingConfig(temperature=0.5, top_k=0, top_p=1.0, repetition_penalty=1.0)
    assert kinds(off) == ["TemperatureLogitsWarper"]


def test_greedy_takes_the_first_of_equals() -> None:
    choose = Sampler(SamplingConfig(), [0]).chooser(torch.zeros(3, VOCABULARY))
    assert [choose(row) for row in range(3)] == [0, 0, 0]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampler(SamplingConfig(temperature=1e-300), [0]).chooser(logits)(0) == 1


def test_logits_that_are_nan_are_refused() -> None:
    with pytest.raises(ModelError, match="--dtype"):
        Sampler(SamplingConfig(temperature=1.0), [0]).chooser(torch.full((1, 5), torch.nan))(0)
