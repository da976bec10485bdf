"""Decode whole answers with various sampling settings."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import Session, decode, decode_batch
from hdtool.runtime.core.step import Step
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.oracle import prompt_of
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

GREEDY = SamplingConfig()
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy, penalised": SamplingConfig(repetition_penalty=1.2),
    "T 0.7": SamplingConfig(temperature=0.7, seed=1),
    "T 1, top-p 0.9": SamplingConfig(temperature=1.0, top_p=0.9, seed=2),
    "T 1, top-k 5, penalised": SamplingConfig(temperature=1.0, top_k=5, repetition_penalty=1.2, seed=3),
}
Key = TypeVar("Key", bound=Hashable)


def run(
    target: Target,
    prompt: list[int],
    sampling: SamplingConfig = GREEDY,
    max_new_tokens: int = 32,
    *,
    stops: Collection[int] = (),
    drafter: Drafter | None = None,
    prediction: Sequence[int] = (),
) -> list[Step]:
    sampler = sampler_of(sampling, prompt)
    steps = decode(
        target, prompt, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter, prediction=prediction
    )
    return list(steps)


def answer_of(
    target: Target, prompt: list[int], sampling: SamplingConfig = GREEDY, max_new_tokens: int = 32, **options: Any
) -> list[int]:
    """Return the tokens of an answer."""
    return output_tokens(run(target, prompt, sampling, max_new_tokens, **options))


def assert_lossless(
    target: Target,
    prompt: list[int],
    sampling: SamplingConfig = GREEDY,
    max_new_tokens: int = 32,
    *,
    expected: list[int] | None = None,
    seeds: Iterable[int] = (1,),
) -> list[int]:
    """Assert that an answer is the same with drafts that are wrong in part, and is ``expected``; return it."""
    plain = answer_of(target, prompt, sampling, max_new_tokens)
    assert expected is None or plain == expected
    for seed in seeds:
        drafter = WrongDrafter(len(prompt), plain, target.vocabulary, seed)
        assert answer_of(target, prompt, sampling, max_new_tokens, drafter=drafter) == plain
        assert drafter.accepted > 0, "drafts that are never accepted test little"
    return plain


def request(
    key: Key, prompt: Sequence[int], drafter: Drafter | None = None, sampling: SamplingConfig = GREEDY, **options: Any
) -> Request[Key]:
    return Request(key, prompt, sampler_of(sampling, prompt), drafter or NoDraft(), **options)


def answers_of(
    target: Target, requests: Iterable[Request[Key]], size: int, max_new_tokens: int = 32, **options: Any
) -> dict[Key, list[int]]:
    """Return the tokens of the answers to requests in ``size`` slots, by the requests' keys."""
    waiting, answers = iter(requests), dict[Key, list[int]]()
    for asked, step in decode_batch(
        target, lambda: next(waiting, None), size, max_new_tokens=max_new_tokens, **options
    ):
        answers.setdefault(asked.key, []).extend(step.tokens)
    return answers


def output_tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def assert_answers_of_batch(
    target: Target,
    prompts: Sequence[list[int]],
    drafters: Sequence[Drafter],
    size: int,
    max_new_tokens: int,
    *,
    more: int = 0,
) -> None:
    """Assert that prompts get the same answers in a batch with fewer slots than prompts as each gets alone.

    Each answer has ``more`` tokens than the one before.
    """
    lengths = [max_new_tokens + more * number for number in range(len(prompts))]
    asked = zip(prompts, drafters, lengths, strict=True)
    requests = [request(n, prompt, each, max_new_tokens=length) for n, (prompt, each, length) in enumerate(asked)]
    alone = {n: answer_of(target, prompt, max_new_tokens=lengths[n]) for n, prompt in enumerate(prompts)}
    assert answers_of(target, requests, size) == alone


def assert_drafts_change_nothing(
    target: Target, drafter: Drafter, sampling: SamplingConfig, lengths: Sequence[int], source: SourceId
) -> None:
    """Assert that answers to prompts of these lengths are the same with a drafter that drafts from a source."""
    drafted = set[int]()
    for length in lengths:
        steps = run(target, prompt_of(length), sampling, 12, drafter=drafter)
        assert output_tokens(steps) == answer_of(target, prompt_of(length), sampling, 12)
        drafted |= {one for step in steps for one in step.tree.sources.tolist()}
    assert source in drafted


def answered(session: Session[int], prompt: list[int], owner: str = "") -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of prompt tokens taken from the prefix cache."""
    session.submit(request(0, prompt, owner=owner))
    steps = [step for _, step in session.steps()]
    return output_tokens(steps), steps[0].cached_tokens


def all_answered(session: Session[int], requests: Sequence[Request[int]]) -> list[list[int]]:
    """Return the tokens of the answers to requests with the keys 0, 1, and so on."""
    tokens: list[list[int]] = [[] for _ in requests]
    for asked in requests:
        session.submit(asked)
    for asked, step in session.steps():
        tokens[asked.key] += step.tokens
    return tokens
