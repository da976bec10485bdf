"""The benchmark that compares methods with plain decoding: what makes it fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hdtool.builders.evaluation.experiment import Figures, Row
from hdtool.data.answered_questions import AnsweredTurn
from tests.benchmarks import exactness
from tests.support.spec_bench_answers import turn_of

PLAIN, OTHER = turn_of([2], 1.0), turn_of([2], 1.0, first=1)


@pytest.mark.parametrize(("generated", "drafted", "code"), [(PLAIN, PLAIN, 0), (OTHER, PLAIN, 1), (PLAIN, OTHER, 1)])
def test_every_difference_from_plain_decoding_is_a_failure(
    generated: AnsweredTurn, drafted: AnsweredTurn, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"ar": [Row("ar", 0, 0, (PLAIN,))], "pld": [Row("pld", 0, 0, (drafted,))]}
    outcome = SimpleNamespace(rows=rows, totals={"pld": Figures()})
    for name, value in {
        "load": lambda _: SimpleNamespace(target=SimpleNamespace(model=None)),
        "demo_prompts": lambda *_: [[1, 2]],
        "method_contender": lambda *_: None,
        "Outcome": lambda *_, **__: outcome,
        "generated": lambda *_, **__: generated.output_ids,
    }.items():
        monkeypatch.setattr(exactness, name, value)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("sys.argv", ["exactness", "--methods", "pld", "--samplings", "greedy", "--prompts", "1"])
    assert exactness.main() == code
