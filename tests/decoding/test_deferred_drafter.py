"""A drafter that joins while an answer is decoded: no token changes, whenever it joins."""

from __future__ import annotations

import pytest

from hdtool.data.prompts import Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.drafters import deferred as module
from hdtool.runtime.drafters.deferred import DeferredDrafter, deferred
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig

PROMPTS = [Prompt.from_text(f"def add_{number}(a, b):") for number in range(3)]
SAMPLINGS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=0.8, seed=3)}


class Loading:
    """Stands for the thread that loads the drafter's code: it ends after so many questions whether it is alive."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def is_alive(self) -> bool:
        self.questions -= 1
        return self.questions >= 0


def join_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(steps)
    monkeypatch.setattr(module, "_loading", lambda: loading)
    monkeypatch.setattr(module, "is_compiling", lambda part: True)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_answers_are_the_same_whenever_the_drafter_joins(
    sampling: SamplingConfig, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(method: str) -> tuple[list[list[int]], int]:
        nodes = None if method == "ar" else 8  # measured costs would make the steps depend on the machine
        decoding = DecodeConfig(method, max_new_tokens=40, batch_size=batch, draft_tokens=nodes)
        answerer = Answerer(ModelConfig(threads=1), decoding, sampling)
        found, steps = [], 0
        for answer in answerer.all_answers(PROMPTS):
            assert "".join(answer) == answer.text
            found.append(answer.output_ids)
            steps += answer.stats.steps
        return found, steps

    expected, plain_steps = answers("ar")
    steps = []
    for joins in (0, 7, 10_000):
        join_after(joins, monkeypatch)
        found, taken = answers("hd")
        assert found == expected
        steps.append(taken)
    assert steps[0] < steps[1] < steps[2] == plain_steps


def test_predictions_and_seeds_reach_the_drafter_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    join_after(2, monkeypatch)
    made: list[Hierarchy] = []

    def make() -> list[Drafter]:
        made.append(Hierarchy())
        return [*made]

    (drafter,) = deferred("hd", make, 1)
    assert isinstance(drafter, DeferredDrafter)
    drafter.set_seed(5)
    drafter.begin([1, 2, 3])
    drafter.predict([4, 5, 6, 7])
    assert len(drafter.draft([1, 2, 3])) == 0 and not made
    tree = drafter.draft([1, 2, 3, 4, 5])
    assert made and tree.tokens[:2].tolist() == [6, 7]
    assert made[0].work["is_sampled"][0] and drafter.joint == made[0].joint


@pytest.mark.parametrize("method", ["ar", "pld", "hd+mtp"])
def test_other_methods_are_made_at_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join_after(10, monkeypatch)
    assert not isinstance(deferred(method, lambda: [NoDraft()], 1)[0], DeferredDrafter)
