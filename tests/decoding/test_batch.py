"""Several answers at once: each is the one that it would have been alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from hdtool.data.errors import PromptError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import NoDraft, WrappedDrafter
from hdtool.runtime.core.prefix_cache import PIECES
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import RESERVED_POSITIONS, Session, decode_batch
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, answered
from tests.support.families import model_of
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.rehearsed import direct
from tests.support.samplers import sampler_of

GREEDY = SamplingConfig()
LENGTHS = (1, 40, 7, 90, 23, 7, 61)


def requests(sampling: SamplingConfig, drafting: bool = False) -> Iterator[Request[int]]:
    for length in LENGTHS:
        drafter = Hierarchy(budget=FixedBudget(9)) if drafting else NoDraft()
        yield Request(length, prompt_of(length), sampler_of(sampling, prompt_of(length)), drafter)


def one_after_another(asked: Iterator[Request[int]]) -> Callable[[], Request[int] | None]:
    return lambda: next(asked, None)


@cache
def given_alone(sampling: SamplingConfig) -> tuple[frozenset[int], list[list[int]]]:
    """Stop tokens, and answers of which some end at one."""
    target = Target(model_of("llama"))
    stops = frozenset(answer_of(target, prompt_of(LENGTHS[1]), sampling)[20:21])
    return stops, [answer_of(target, prompt_of(length), sampling, stops=stops) for length in LENGTHS]


@pytest.mark.each_value
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_answer_is_the_one_given_alone(size: int, sampling: SamplingConfig, drafting: bool) -> None:
    target = Target(model_of("llama"))
    stops, alone = given_alone(sampling)
    ask = one_after_another(requests(sampling, drafting))
    answers: list[tuple[int, list[int]]] = []
    going: dict[int, list[int]] = {}
    for request, step in decode_batch(target, ask, size, max_new_tokens=32, stops=stops):
        going.setdefault(id(request), []).extend(step.tokens)
        if step.finish:
            answers.append((request.key, going.pop(id(request))))
    assert not going
    assert sorted(answers) == sorted(zip(LENGTHS, alone, strict=True))
    assert len(set(map(len, alone))) > 1, "answers that end at the same step free no slot early"


def test_the_cache_grows_for_a_longer_request_in_a_running_batch() -> None:
    target = Target(model_of("llama"))
    cache = target.allocate(2)
    short, long = prompt_of(3), prompt_of(200)
    target.prefill(cache, 0, short, room=4)
    target.prefill(cache, 1, long, room=4)
    for found, context in zip(target.verify(cache, [DraftTree.bare(5)] * 2), (short, long), strict=True):
        assert_same_logits(found.logits[0], plain_logits(target.model, [*context, 5]))


def test_the_next_request_is_taken_only_when_a_slot_is_free() -> None:
    target = Target(model_of("llama"))
    events: list[str] = []

    def told() -> Iterator[Request[int]]:
        for request in requests(SamplingConfig()):
            events.append("asked")
            yield request

    for _, step in decode_batch(target, one_after_another(told()), 2, max_new_tokens=3):
        if step.finish:
            events.append("done")
    for place, event in enumerate(events):
        asked, done = events[: place + 1].count("asked"), events[: place + 1].count("done")
        assert asked - done <= 2, event
    assert torch.is_inference_mode_enabled() is False


def test_an_answer_longer_than_the_room_of_its_slot() -> None:
    target = Target(model_of("llama"))
    prompt = prompt_of(5)
    session = Session[int](target, target.allocate(2), max_new_tokens=RESERVED_POSITIONS + 200)
    assert answered(session, prompt)[0] == answer_of(target, prompt, GREEDY, RESERVED_POSITIONS + 200)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("capture", [never, direct], ids=["after", "ahead"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_request_that_is_cancelled_leaves_the_others(slots: int, capture: CaptureMaker) -> None:
    """Also while the pass that verifies its draft runs, which is started ahead if all slots are in use."""
    target = Target(model_of("llama"), capture)
    session = Session[int](target, target.allocate(slots), max_new_tokens=30)
    drafters = [Counting(NoDraft()) for _ in range(3)]
    tokens: list[list[int]] = [[], [], []]
    requests = [Request(n, prompt_of(5 + n), Sampler(GREEDY, prompt_of(5 + n)), drafters[n]) for n in range(3)]
    for request in requests:
        session.submit(request)
    for request, step in session.steps():
        tokens[request.key] += step.tokens
        if request.key == 1 and len(tokens[1]) == 6:
            session.cancel(requests[0])
    assert len(tokens[0]) < 30
    assert tokens[1:] == [answer_of(target, prompt_of(5 + number), GREEDY, 30) for number in (1, 2)]
    assert [drafter.ends for drafter in drafters] == [1, 1, 1]


class Counting(WrappedDrafter):
    ends = 0

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_answer_that_ends_before_its_prompt_is_read_ends_its_drafter(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdtool.runtime.core.prefix_cache.PIECES", (8, 8))
    target = Target(model_of("llama"))
    drafter, prompt = Counting(NoDraft()), prompt_of(40)
    session = Session[int](target, target.allocate(2), max_new_tokens=5, in_pieces=True)
    session.submit(request := Request(0, prompt, Sampler(GREEDY, prompt), drafter))
    assert session.advance() == []
    if is_cancelled:
        session.cancel(request)
        assert session.advance() == []
    else:
        session.end()
    assert (drafter.ends, len(session)) == (1, 0)
    assert answered(session, prompt)[0] == answer_of(target, prompt, GREEDY, 5)


def test_running_answers_go_on_between_the_pieces_of_a_prompt() -> None:
    target = Target(model_of("llama"))
    session = Session[int](target, target.allocate(2), max_new_tokens=9, in_pieces=True)
    prompts = [prompt_of(5), prompt_of(3 * PIECES[1])]
    for number, prompt in enumerate(prompts):
        session.submit(Request(number, prompt, Sampler(GREEDY, prompt)))
    emitted, tokens = list[list[int]](), list[list[int]]([[], []])
    while len(session):
        outcomes = session.advance()
        emitted.append([request.key for request, _ in outcomes])
        for request, step in outcomes:
            assert isinstance(step, Step)
            tokens[request.key] += step.tokens
    assert emitted[:7] == [[0], [0], [], [0], [], [0], [1]]
    assert tokens == [answer_of(target, prompt, GREEDY, 9) for prompt in prompts]


def test_a_request_that_cannot_be_answered_leaves_the_others() -> None:
    target = Target(model_of("llama"))
    session, prompt = Session[int](target, target.allocate(2), max_new_tokens=5), prompt_of(5)
    for number, ids in enumerate((prompt, [], prompt)):
        session.submit(Request(number, ids, Sampler(GREEDY, ids)))
    outcomes = [outcome for _ in range(9) for outcome in session.advance()]
    assert [request.key for request, step in outcomes if isinstance(step, PromptError)] == [1]
    assert sum(isinstance(step, Step) for _, step in outcomes) == 10 and not len(session)
