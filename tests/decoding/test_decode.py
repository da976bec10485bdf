"""The decoding loop: with any drafts the output equals plain decoding and ends where it should."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hdtool.data.errors import OptionError, PromptError
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Finish, Stats
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, output_tokens, run
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import prompt_of
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 30), st.floats(0, 2))
def test_random_drafts_lengths_and_seeds_do_not_change_the_output(
    seed: int, length: int, most: int, temperature: float
) -> None:
    target = TARGET
    prompt = prompt_of(length)
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    plain = answer_of(target, prompt, sampling, most)
    drafted = run(target, prompt, sampling, most, drafter=WrongDrafter(length, plain, VOCABULARY, seed))
    assert output_tokens(drafted) == plain
    assert drafted[-1].finish is Finish.LENGTH


TARGET = Target(model_of("llama"))


def test_a_stop_token_ends_the_answer_even_inside_a_draft() -> None:
    prompt = prompt_of(12)
    plain = answer_of(TARGET, prompt, SamplingConfig())
    stop = plain[10]
    expected = plain[: plain.index(stop) + 1]
    for seed in range(8):
        wrong_drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed)
        steps = run(TARGET, prompt, SamplingConfig(), stops={stop, 10**9}, drafter=wrong_drafter)
        assert output_tokens(steps) == expected
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + [Finish.STOP]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_criterion_sees_each_emitted_token_once_and_ends_the_answer(temperature: float) -> None:
    prompt, sampling = prompt_of(12), SamplingConfig(temperature=temperature, seed=3)
    plain = answer_of(TARGET, prompt, sampling)
    for seed in range(8):
        seen = list[int]()

        def is_met(sampler: Sampler, token: int, seen: list[int] = seen) -> bool:
            seen.append(token)
            return sampler.context[len(prompt) :] == plain[:11]

        sampler = sampler_of(sampling, prompt, criteria=[is_met])
        drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed)
        steps = list(decode(TARGET, prompt, sampler, max_new_tokens=40, drafter=drafter))
        assert output_tokens(steps) == seen == plain[:11]
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + [Finish.STOP]


def test_the_length_limit_holds_inside_a_draft() -> None:
    prompt = prompt_of(12)
    plain = answer_of(TARGET, prompt, SamplingConfig())
    for most in (1, 2, 3, 17):
        wrong_drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed=most, max_nodes=30)
        steps = run(TARGET, prompt, SamplingConfig(), most, drafter=wrong_drafter)
        assert output_tokens(steps) == plain[:most]
        assert steps[-1].finish is Finish.LENGTH
        assert all(step.tree.depths.max() < most for step in steps)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_full_context_ends_the_answer(family: str) -> None:
    """GPT-2 has learned positions: reading one past the end would fail, so no draft may stand there."""
    target = Target(model_of(family))
    prompt = prompt_of(500)
    plain = run(target, prompt, SamplingConfig(), 100)
    assert len(output_tokens(plain)) == 12
    assert plain[-1].finish is Finish.CONTEXT
    wrong_drafter = WrongDrafter(len(prompt), output_tokens(plain) * 2, VOCABULARY, seed=5, max_nodes=30)
    assert answer_of(target, prompt, SamplingConfig(), 100, drafter=wrong_drafter) == output_tokens(plain)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(PromptError, match=r"512 tokens long, but the model's context holds 512"):
        run(TARGET, prompt_of(512), SamplingConfig())


def test_the_seed_determines_the_answer() -> None:
    prompt = prompt_of(9)
    first, again, other = (answer_of(TARGET, prompt, SamplingConfig(temperature=1.0, seed=seed)) for seed in (4, 4, 5))
    assert first == again != other


def test_steps_account_for_their_time() -> None:
    stats = Stats()
    for step in run(TARGET, prompt_of(9), SamplingConfig(), 10):
        assert 0 <= step.draft_seconds <= step.seconds
        assert 0 < step.verify_seconds <= step.seconds
        stats.add(step)
    assert (stats.tokens, stats.steps, stats.finish) == (10, 10, Finish.LENGTH)
    assert stats.tokens_per_step == 1.0
    assert stats.outside_us_per_step > 0
    total = Stats.total([stats, stats])
    assert (total.tokens, total.seconds) == (20, 2 * stats.seconds)


@pytest.mark.parametrize("most", [0, -1])
def test_an_answer_without_tokens_is_refused(most: int) -> None:
    prompt = prompt_of(5)
    with pytest.raises(OptionError, match=f"max_new_tokens is {most}, but an answer has at least one token"):
        list(decode(Target(model_of("llama")), prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=most))
