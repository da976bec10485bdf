"""What a report finds out: shares of sources and cases, against plain counting."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.builders.evaluation.experiment import shown_pieces
from hdtool.builders.evaluation.replay import ReplayedTurn, ReplayResult
from hdtool.builders.evaluation.report.measurements import BenchMeasurements
from hdtool.builders.evaluation.report.source_shares import SourceCounts, SourceShares, replayed_shares, source_wins
from hdtool.builders.evaluation.report.typical_case import DraftedAnswer, typical_case
from hdtool.cli.app import run
from hdtool.data.bench_results import BenchRun, Results
from hdtool.data.prompts import Prompt
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer
from tests.support.spec_bench_answers import answered, turn_of


def played_turn(tokens: list[int], sources: list[int], steps: list[int] | None = None) -> ReplayedTurn:
    steps = steps or [1] * len(tokens)
    nothing = np.zeros(len(steps))
    drafted = np.bincount(sources, minlength=len(SourceId))
    return ReplayedTurn(
        "1", "", 0, 3, np.array(tokens), np.array(sources, np.uint8), np.array(steps), nothing.astype(int),
        nothing, nothing, drafted, (drafted > 0).astype(int),
    )  # fmt: skip


# Shares ---------------------------------------------------------------------------------------


def test_shares_are_of_the_steps_that_could_be_drafted_for() -> None:
    one = played_turn([1, 2, 3, 4], [0, 1, 1, 0], [1, 3])
    shares = replayed_shares(ReplayResult("hd", (one,), {SourceId.MODEL: 0.1}))
    assert shares.steps == 1
    assert shares.sources == {"context": SourceCounts(2, 2, 1, 1)}, "what only took time drafted nothing"


def test_a_benchmark_has_the_shares_of_its_answers() -> None:
    sources = {"context": {"drafted": 9, "accepted": 3, "hits": 2}, "model": {"drafted": 4, "accepted": 0, "hits": 1}}
    one = answered("a", "qa", turn_of([1, 3, 2], 1.0, drafted_by=[0, 1, 1, 0, 1, 0], sources=sources))
    run = BenchRun({"temperature": 0.0}, ("ar", "hd"), 1, {}, "now")
    (found,) = BenchMeasurements(
        Results(run, {"ar": [answered("a", "qa", turn_of([1] * 6, 2.0))], "hd": [one]})
    ).shares()
    assert found == SourceShares("hd", 2, {"context": SourceCounts(9, 3, 2, 2), "model": SourceCounts(4, 0, 1, 0)})


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_a_source_wins_a_step_once(steps: list[list[int]]) -> None:
    found = source_wins(list(chain.from_iterable(steps)), [len(step) for step in steps])
    assert found == {source: sum(source in step for step in steps) for source in set(chain.from_iterable(steps))}


# Cases, recordings ----------------------------------------------------------------------


def test_a_case_is_the_answer_nearest_to_the_mean() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    ids = tokenizer("The quick brown fox jumps over the lazy dog, twice. " * 8)["input_ids"][:60]
    # 1, 2 and 6 tokens a step: 1.8 of all
    answers = [DraftedAnswer(name, ids, [0] * 60, steps) for name, steps in (("one", 60), ("two", 30), ("six", 10))]
    case = typical_case("hd", answers, tokenizer)
    assert case and (case.question, case.tokens, case.steps) == ("two", 60, 30)
    assert "".join(text for text, _ in case.pieces) == text_of(tokenizer, ids)
    named = shown_pieces(tokenizer, ids[1:4], [0, 1, 3])  # the first has no text
    assert [str(source) for _, source in named] == ["none", "context", "corpus"]
    assert typical_case("hd", [], tokenizer) is None


def test_a_case_of_a_benchmark_is_one_of_its_answers() -> None:
    prompt = Prompt(({"role": "user", "content": "one"},), ("two", "three"), "7", "qa")
    turns = turn_of([1, 2], 1.0, drafted_by=[0, 0, 1]), turn_of([2], 1.0, drafted_by=[0, 2]), turn_of([], 0.0)
    rows = {"hd": [answered(7, "qa", *turns)], "generate": [answered(7, "qa", *[turn_of([1], 1.0)] * 3)]}
    run = BenchRun({"temperature": 0.0}, ("hd", "generate"), 2, {}, "now")
    measured = BenchMeasurements(Results(run, rows))
    assert list(measured.drafted_answers("hd", [prompt, prompt])) == [
        DraftedAnswer("one", [0, 1, 2], [0, 0, 1], 2),
        DraftedAnswer("two", [0, 1], [0, 2], 1),
    ]
    assert not list(measured.drafted_answers("generate", [prompt]))


# The commands ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_replay_makes_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one two " * 40}]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n", encoding="utf-8")
    out = tmp_path / "report"
    arguments = ["replay", "--traces", str(tmp_path / "traces.jsonl"), "--report", str(out), "--quiet"]
    assert run([*arguments, "--methods", "pld,hd", "--model-db", "none", "--corpus-db", "none"]) == 0
    assert f"report: {out / 'index.html'}" in capfd.readouterr().err
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "1 conversations, 1 answers" in page
    assert "sources-hd.png" in {path.name for path in out.glob("*.png")}


@pytest.mark.long
def test_a_benchmark_makes_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    quick = ["--num-prompts", "2", "--max-new-tokens", "6", "--warm-up", "0", "--quiet", "--methods", "ar,pld"]
    stores = ["--model-db", "none", "--corpus-db", "none", "--out", str(tmp_path / "bench")]
    assert run(["bench", *quick, *stores, "--temperatures", "0,0.7", "--report", str(out)]) == 0, capfd.readouterr()
    names = {path.name for path in out.glob("*.png") if ".dark" not in path.name}
    assert names >= {"speed-up.png", "generation-time.png", "temperatures.png"}
    assert [path.name for path in (tmp_path / "bench").iterdir() if path.is_dir()] == ["temperature-0.7"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--temperatures", "0.5"], "--temperatures has no effect without --report"),
        (["--temperatures", "0.5,hot", "--report", "r"], "numbers separated by commas"),
        (["--temperatures", "-1", "--report", "r"], "--temperature must be 0 (greedy) or more, got -1.0"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    assert complaint in capfd.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["bench", "--report", str(tmp_path / "file"), "--out", str(tmp_path / "bench")]) == 1
    assert "choose another --report" in capfd.readouterr().err
    assert not (tmp_path / "bench").exists()
