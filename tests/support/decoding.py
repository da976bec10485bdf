"""Decode whole answers with various sampling settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request, Step
from hdtool.runtime.core.session import Session, decode
from hdtool.runtime.target.target import Target
from tests.support.trees import WrongDrafter

SAMPLINGS = {
    "greedy": SamplingConfig(),
    "greedy, penalised": SamplingConfig(repetition_penalty=1.2),
    "T 0.7": SamplingConfig(temperature=0.7, seed=1),
    "T 1, top-p 0.9": SamplingConfig(temperature=1.0, top_p=0.9, seed=2),
    "T 1, top-k 5, penalised": SamplingConfig(temperature=1.0, top_k=5, repetition_penalty=1.2, seed=3),
}


def run(
    target: Target,
    prompt: list[int],
    sampling: SamplingConfig,
    max_new_tokens: int = 32,
    *,
    stops: Collection[int] = (),
    drafter: Drafter | None = None,
    prediction: Sequence[int] = (),
) -> list[Step]:
    sampler = Sampler(sampling, prompt)
    steps = decode(
        target, prompt, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter, prediction=prediction
    )
    return list(steps)


def output_tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def assert_drafts_keep(
    plain: list[int],
    target: Target,
    prompt: list[int],
    sampling: SamplingConfig,
    max_new_tokens: int = 32,
    *,
    seed: int = 1,
) -> None:
    """Assert that an answer has the tokens of plain decoding with wrong drafts, too, some of which are accepted."""
    drafter = WrongDrafter(len(prompt), plain, target.vocabulary, seed)
    assert output_tokens(run(target, prompt, sampling, max_new_tokens, drafter=drafter)) == plain
    assert drafter.accepted, "drafts that are never accepted test little"


def answered(session: Session[int], prompt: list[int], owner: str = "") -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of prompt tokens taken from the prefix cache."""
    session.submit(Request(0, prompt, Sampler(SamplingConfig(), prompt), owner=owner))
    steps = [step for _, step in session.steps()]
    return output_tokens(steps), steps[0].cached_tokens


def all_answered(session: Session[int], requests: Sequence[Request[int]]) -> list[list[int]]:
    """Return the tokens of the answers to requests with the keys 0, 1, and so on."""
    tokens: list[list[int]] = [[] for _ in requests]
    for request in requests:
        session.submit(request)
    for request, step in session.steps():
        tokens[request.key] += step.tokens
    return tokens
