"""The arithmetic of a benchmark's table, on answers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hdtool.builders.evaluation import timing
from hdtool.builders.evaluation.report.measurements import BenchMeasurements
from hdtool.builders.evaluation.scores import ALL_TASKS, scores_of
from hdtool.cli.result_tables import bench_table
from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.data.bench_results import BenchRun, Results
from hdtool.data.errors import OptionError
from tests.support.spec_bench_answers import answered, turn_of

ABOUT = {"model": "toy", "device": "cpu", "dtype": "float32", "threads": 2, "machine": "a fast one, " * 20}


def results_of(answers: dict[str, list[AnsweredQuestion]], temperature: float = 0.0) -> Results:
    count = len(next(iter(answers.values())))
    return Results(BenchRun({"temperature": temperature}, tuple(answers), count, ABOUT), answers)


SLOW = [
    answered(1, "writing", turn_of([1] * 10, 1.0), turn_of([1] * 20, 2.0)),  # 10 a second
    answered(2, "stem", turn_of([1] * 20, 1.0)),  # 20 a second
    answered(3, "qa", turn_of([1] * 30, 1.0)),  # 30 a second
]
FAST = [
    answered(1, "writing", turn_of([4, 6], 1.0, nodes=10), turn_of([20], 0.5, nodes=3)),  # 20 a second
    answered(2, "stem", turn_of([10, 10], 0.5)),  # 40 a second
    answered(3, "qa", turn_of([29], 0.5)),  # 58 a second, and one token too few
]


def test_speeds_are_means_over_questions_and_steps_are_pooled() -> None:
    scores = scores_of(results_of({"ar": SLOW, "generate": SLOW, "hd": FAST}))
    assert (scores.baseline, scores.reference) == ("generate", "ar")
    assert list(scores.tasks) == ["mt_bench", "qa", ALL_TASKS]
    mt, qa, overall = (scores.tasks[task] for task in scores.tasks)
    assert mt["generate"].tokens_per_second == pytest.approx(15)
    assert mt["hd"].tokens_per_second == pytest.approx(30)
    assert mt["hd"].speedup == pytest.approx(2)
    assert overall["hd"].speedup == pytest.approx((20 + 40 + 58) / (10 + 20 + 30))
    assert mt["hd"].tokens_per_step == pytest.approx(50 / 5)
    assert overall["hd"].tokens_per_step == pytest.approx(79 / 6)
    assert overall["hd"].nodes_per_step == pytest.approx(13 / 6)
    assert [task["hd"].identical for task in (mt, qa, overall)] == [2, 0, 2]
    assert [overall[method].identical for method in ("ar", "generate")] == [3, 3]
    assert [task["hd"].questions for task in (mt, qa, overall)] == [2, 1, 3]


def test_any_method_can_be_the_baseline() -> None:
    results = results_of({"generate": SLOW, "hd": FAST})
    assert scores_of(results, "hd").tasks[ALL_TASKS]["generate"].speedup == pytest.approx(60 / 118)
    assert scores_of(results).reference == "generate"
    assert scores_of(results_of({"pld": FAST, "hd": SLOW})).baseline == "pld"
    with pytest.raises(OptionError, match="baseline is ar, which is not measured here: name one of generate, hd"):
        scores_of(results, "ar")


def test_without_a_plain_method_nothing_is_called_identical() -> None:
    scores = scores_of(results_of({"pld": FAST, "hd": FAST}))
    assert scores.reference is None
    assert scores.tasks[ALL_TASKS]["hd"].identical is None
    assert "identical: " not in bench_table(results_of({"pld": FAST, "hd": FAST}), scores)


def test_sampled_answers_of_the_library_are_not_compared() -> None:
    scores = scores_of(results_of({"generate": SLOW, "ar": SLOW, "hd": SLOW}, temperature=0.7))
    assert [score.identical for score in scores.tasks[ALL_TASKS].values()] == [None, 3, 3]
    assert scores_of(results_of({"generate": SLOW, "hd": SLOW}, temperature=0.7)).reference is None


def test_a_category_that_only_sounds_like_mt_bench_stands_for_itself() -> None:
    own = [answered(1, "math", turn_of([1], 1.0)), answered(2, "edit", turn_of([1], 1.0))]
    assert list(scores_of(results_of({"ar": own})).tasks) == ["math", "edit", ALL_TASKS]


def test_the_headline_is_the_default_method_against_plain_decoding_first() -> None:
    slower = [answered(1, "qa", turn_of([1] * 8, 1.0))]
    plain, fast = ([answered(1, "qa", turn_of([1] * rate, 1.0))] for rate in (10, 12))
    generate = [answered(1, "qa", turn_of([1] * 2, 1.0))]
    gain = "hd answers 1.20 times as fast as plain decoding on the same engine (ar)."
    whole = scores_of(results_of({"generate": generate, "ar": plain, "pld": plain, "hd": fast}))
    both = f"{gain} Against generate it is 6.00 times as fast; plain decoding alone 5.00."
    assert whole.headline() == both
    assert bench_table(results_of({"ar": plain, "hd": fast}), whole).startswith(gain)
    head, setting = bench_table(results_of({"generate": generate, "ar": plain, "hd": fast}), whole).split("\n\n")[:2]
    assert " ".join(head.split("\n")) == both and setting.startswith("toy on cpu")

    loses = scores_of(results_of({"generate": generate, "ar": plain, "rest": fast, "hd": slower})).headline()
    assert loses.startswith(
        "hd answers 0.80 times as fast as plain decoding on the same engine (ar): drafting does not"
    )
    without = scores_of(results_of({"generate": generate, "pld": plain, "rest": fast})).headline()
    assert without == (
        "rest answers 12.0 tokens/s. Against generate it is 6.00 times as fast; without ar among the methods, what "
        "drafting brings is not known."
    )
    assert scores_of(results_of({"ar": plain})).headline() == "ar answers 10.0 tokens/s."


def test_in_doubt_neither_headline_nor_table_has_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_WAITED", 0.25)
    busy = [answered(name, task, turn_of([1] * 9, 9.0, waited_seconds=18.0)) for name, task in enumerate(("qa", "rag"))]
    idle = [answered(name, task, turn_of([1] * 9, 1.0, waited_seconds=0.1)) for name, task in enumerate(("qa", "rag"))]
    assert scores_of(results_of({"ar": idle, "hd": idle})).doubt == ""
    results = results_of({"generate": busy, "ar": idle, "hd": idle})
    scores = scores_of(results)
    assert scores.headline() == scores.doubt == scores.to_json()["doubt"]
    assert scores.doubt.startswith("No speed-up is stated, because the machine was busy: the threads of generate wait")
    shown = bench_table(results, scores)
    assert " ".join(shown.split()).startswith(scores.doubt)
    assert "vs " not in shown and "times" not in shown and "tokens/s" in shown
    assert BenchMeasurements(results).speedups() is None


def test_cpu_time_is_shown_beside_wall_time() -> None:
    timed = [answered(1, "qa", turn_of([2] * 6, 3.0, cpu_seconds=4.0), turn_of([1] * 8, 1.0, cpu_seconds=1.0))]
    results = results_of({"ar": timed, "hd": SLOW[:1]})
    scores = scores_of(results)
    assert scores.tasks[ALL_TASKS]["ar"].tokens_per_cpu_second == pytest.approx(20 / 5)
    assert scores.tasks[ALL_TASKS]["hd"].tokens_per_cpu_second is None, "an earlier version measured no CPU time"
    lines = [line.split() for line in bench_table(results, scores).splitlines()]
    assert ["overall", "(1)", "tokens/s", "tokens/CPU", "s", "vs", "plain", "identical"] in lines
    assert ["ar", "5.0", "4.0", "1.00", "1"] in lines and ["hd", "10.0", "-", "2.00", "0"] in lines


@pytest.mark.parametrize("category", ["", "qa"])
def test_one_category_or_none_needs_no_table_of_its_own(category: str) -> None:
    own = [answered(number, category, turn_of([2], 1.0)) for number in range(3)]
    scores = scores_of(results_of({"ar": own}))
    assert list(scores.tasks) == [ALL_TASKS]
    assert scores.tasks[ALL_TASKS]["ar"].questions == 3


def test_times_of_drafting_are_told_where_they_are_known() -> None:
    known: Any = {"draft_seconds": 0.002, "model_seconds": 0.5}
    own = [answered(1, "qa", turn_of([1, 1], 1.0, **known), turn_of([1, 1], 1.0, **known))]
    peers = [answered(1, "qa", turn_of([1] * 4, 1.0))]
    overall = scores_of(results_of({"generate": peers, "hd": own})).tasks[ALL_TASKS]
    assert overall["hd"].draft_us_per_step == pytest.approx(1000)
    assert overall["hd"].model_ms_per_step == pytest.approx(250)
    assert (overall["generate"].draft_us_per_step, overall["generate"].model_ms_per_step) == (None, None)


def test_the_table_fits_a_terminal() -> None:
    fast = [answered(number, "qa", turn_of([9] * 1000, 0.001)) for number in range(480)]
    results = results_of({"generate-assisted": fast, "hd": fast})
    shown = bench_table(results, scores_of(results))
    assert max(map(len, shown.splitlines())) <= 80
    assert "generate-assisted  9000000.0             -         1.00" in shown


def test_tables_by_task_fit_a_terminal_as_well() -> None:
    tasks = ("writing", "stem", "translation", "summarization", "qa", "math_reasoning", "rag")
    rows = [answered(number, task, turn_of([1] * 100, 0.1)) for number, task in enumerate(tasks)]
    fast = [answered(number, task, turn_of([9 + number] * 100, 0.1)) for number, task in enumerate(tasks)]
    results = results_of({"generate-assisted": rows, "ar": rows, "hd": fast})
    lines = bench_table(results, scores_of(results)).splitlines()
    assert max(map(len, lines)) <= 80
    (per_step,) = (place for place, line in enumerate(lines) if line.startswith("tokens a step "))
    assert lines[per_step].split()[3:] == ["mt_bench", "translat…", "summariz…", "qa", "math_rea…", "rag", "overall"]
    assert lines[per_step + 3].split() == ["hd", "9.50", "11.00", "12.00", "13.00", "14.00", "15.00", "12.00"]


def test_many_categories_continue_below() -> None:
    rows = [answered(number, f"category {number:02}", turn_of([2], 1.0)) for number in range(9)]
    results = results_of({"ar": rows})
    lines = bench_table(results, scores_of(results)).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if line.startswith("vs plain ")]
    assert len(shown) == 2 and shown[1].endswith("overall")
