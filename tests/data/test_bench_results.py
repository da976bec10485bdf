"""Results on disk: Spec-Bench's format, whole after any kill, never mixed with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from hdtool.data.answered_questions import AnsweredQuestion, question_id
from hdtool.data.bench_results import BenchRun, ResultFolder, locked_results, read_results
from hdtool.data.errors import ResultError
from tests.support.spec_bench_answers import answered, turn_of

METHODS = ("generate", "ar", "hd")
IDS: list[int | str] = [81, 82, "own", 84]
RUN = BenchRun(
    options={"temperature": 0.0, "seed": 0, "methods": None, "questions": "a hash"},
    methods=METHODS,
    questions=len(IDS),
    surroundings={"model": "toy", "machine": "a fast one", "stores": {}},
    started="2026-01-01T00:00:00+00:00",
)


def rows_of(place: int) -> dict[str, AnsweredQuestion]:
    """What all methods answered to a question: two turns, the second of many steps."""
    turns = (turn_of([1, 3, 2], 0.5), turn_of([1] * (place + 1), 0.25, first=9, nodes=7, drafted_by=[0, 2]))
    return {method: answered(IDS[place], "qa", *turns) for method in METHODS}


def filled(folder: Path, until: int = len(IDS)) -> ResultFolder:
    with locked_results(folder):
        results = ResultFolder(folder, RUN, IDS)
        for place in range(results.answered, until):
            results.add(rows_of(place))
    return results


def refusal(folder: Path, run: BenchRun = RUN, ids: Sequence[int | str] = IDS) -> str:
    with pytest.raises(ResultError) as caught:
        ResultFolder(folder, run, ids)
    return str(caught.value)


def test_answers_come_back_as_they_went(tmp_path: Path) -> None:
    filled(tmp_path)
    results = read_results(tmp_path)
    assert results.run == RUN and results.complete
    assert results.answers == {method: [rows_of(place)[method] for place in range(len(IDS))] for method in METHODS}


def test_answers_of_earlier_versions_have_no_cpu_time(tmp_path: Path) -> None:
    filled(tmp_path)
    for method in METHODS:
        path = tmp_path / f"{method}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            for name in ("first_seconds", "cpu_seconds", "waited_seconds"):
                del row["choices"][0][name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_results(tmp_path).answers["hd"] == [rows_of(place)["hd"] for place in range(len(IDS))]


def test_spec_bench_can_count_them(tmp_path: Path) -> None:
    """Its speed.py, done over: what it reads of each row, and what it makes of it."""
    filled(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "hd.jsonl").read_text().splitlines()]
    speeds, lengths = [], []
    for row in rows:
        assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == set(row)
        (choice,) = row["choices"]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
        assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == 2
        assert sum(choice["new_tokens"]) == sum(choice["accept_lengths"])
        assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
    assert rows[0]["model_id"] == "toy-hd"
    assert len({row["answer_id"] for row in rows}) == len(rows)
    assert fmean(speeds) == pytest.approx(fmean([7 / 0.75, 8 / 0.75, 9 / 0.75, 10 / 0.75]))
    assert fmean(lengths) == pytest.approx(34 / 22)


@pytest.mark.parametrize(("name", "kept"), [("81", 81), ("081", "081"), ("math-01", "math-01"), ("", ""), ("²", "²")])
def test_ids_stay_as_the_questions_had_them(name: str, kept: int | str) -> None:
    assert question_id(name) == kept


@pytest.mark.parametrize("seed", range(24))
def test_a_run_killed_anywhere_goes_on_and_ends_the_same(tmp_path: Path, seed: int) -> None:
    """A kill comes while the answers to one question are written, method by method."""
    filled(tmp_path)
    chance = Random(seed)
    done, written = chance.randrange(len(IDS)), chance.randrange(len(METHODS))
    ends = []
    for number, method in enumerate(METHODS):
        path = tmp_path / f"{method}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        kept = b"".join(lines[: done + (number < written)])
        if number == written:
            kept += lines[done][: chance.randrange(len(lines[done]))]
        ends.append(kept.count(b"\n"))
        path.write_bytes(kept)
        if not kept and chance.random() < 0.5:
            path.unlink()
    assert {len(rows) for rows in read_results(tmp_path).answers.values()} == {min(ends)}
    with locked_results(tmp_path):
        assert ResultFolder(tmp_path, RUN, IDS).answered == min(ends)
    assert filled(tmp_path).answered == len(IDS)
    assert read_results(tmp_path).answers == {
        method: [rows_of(place)[method] for place in range(len(IDS))] for method in METHODS
    }


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(RUN, options=RUN.options | {"temperature": 0.7}), "with temperature 0.0, not 0.7: choose another"),
        (replace(RUN, options=RUN.options | {"seed": 3}), "with seed 0, not 3"),
        (replace(RUN, options=RUN.options | {"methods": ["ar", "hd"]}), "with methods none, not ar,hd"),
        (replace(RUN, options=RUN.options | {"questions": "others"}), "holds a run over other questions"),
        (replace(RUN, surroundings=RUN.surroundings | {"machine": "a slow one"}), "machine a fast one, not a slow one"),
        (replace(RUN, surroundings=RUN.surroundings | {"stores": {"model": 1}}), "was begun with other stores"),
    ],
)
def test_other_settings_are_refused_and_named(tmp_path: Path, run: BenchRun, said: str) -> None:
    filled(tmp_path, until=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert said in refusal(tmp_path, run)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ar.jsonl").write_text("a poem")
    assert "ar.jsonl exists, but run.json does not" in refusal(tmp_path)
    assert (tmp_path / "ar.jsonl").read_text() == "a poem"
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("line", ["a poem", "{}", "[]", '{"choices": []}', '{"choices": [{"turns": 3}]}', "null"])
def test_a_line_of_something_else_is_named(tmp_path: Path, line: str) -> None:
    filled(tmp_path, until=2)
    with open(tmp_path / "ar.jsonl", "a") as stream:
        stream.write(line + "\n")
    assert f"{tmp_path / 'ar.jsonl'}:3 is not an answer of hdtool bench" in refusal(tmp_path)


def test_steps_that_do_not_add_up_are_no_answer(tmp_path: Path) -> None:
    filled(tmp_path, until=1)
    path = tmp_path / "ar.jsonl"
    row: dict[str, Any] = json.loads(path.read_text())
    row["choices"][0]["accept_lengths"].append(1)
    path.write_text(json.dumps(row) + "\n")
    assert "ar.jsonl:1 is not an answer" in refusal(tmp_path)


def test_questions_in_another_order_are_refused(tmp_path: Path) -> None:
    filled(tmp_path, until=2)
    assert "does not hold the questions in their order" in refusal(tmp_path, ids=[82, 81, 84, "own"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a run of hdtool bench"),
        ("[]", "is not a run of hdtool bench"),
        ('{"format": 1}', "is not a run of hdtool bench"),
        ('{"format": 1, "methods": 3, "options": {}, "questions": 1}', "is not a run of hdtool bench"),
        ('{"format": 9}', "has format 9, this hdtool reads 1"),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert said in refusal(tmp_path)
    with pytest.raises(ResultError, match=said):
        read_results(tmp_path)


def test_a_folder_without_results_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="holds no results: make some with hdtool bench"):
        read_results(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lose(folder: Path) -> None:
    (folder / "ar.jsonl").unlink()


def shorten(folder: Path) -> None:
    path = folder / "ar.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))


def lengthen(folder: Path) -> None:
    (folder / "hd.jsonl").write_bytes((folder / "hd.jsonl").read_bytes() + b"one line of a novel")


def replace_by_a_line(folder: Path) -> None:
    (folder / "hd.jsonl").write_bytes(b"one line of a novel")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lose,
            "ar.jsonl holds 0 answers, generate.jsonl holds 3, and a kill leaves a difference of 1 at most: restore",
        ),
        (shorten, "ar.jsonl holds 1 answers, generate.jsonl holds 3, and a kill leaves a difference of 1 at most"),
        (lengthen, "hd.jsonl:4 is cut short and is not an answer of hdtool bench to question 4: remove that line, or"),
        (replace_by_a_line, "hd.jsonl:1 is cut short and is not an answer of hdtool bench to question 1"),
    ],
)
def test_what_no_kill_leaves_is_refused_and_nothing_is_cut(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    filled(tmp_path, until=3)
    change(tmp_path)
    before = contents(tmp_path)
    assert said in refusal(tmp_path)
    assert contents(tmp_path) == before


def test_a_torn_line_after_the_last_question_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "ar.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:9])
    assert "ar.jsonl:5 is cut short" in refusal(tmp_path)


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "ar.jsonl").symlink_to(tmp_path / "nowhere")
    assert "ar.jsonl exists, but run.json does not" in refusal(tmp_path)


def test_two_at_once_and_unwritable_places_are_told_apart(tmp_path: Path) -> None:
    with (
        locked_results(tmp_path / "new"),
        pytest.raises(ResultError, match="another bench is writing"),
        locked_results(tmp_path / "new"),
    ):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot be written"), locked_results(tmp_path / "file"):
        pass
    with pytest.raises(ResultError, match=r"cannot be written \(No space left"), locked_results(tmp_path):
        raise OSError(28, "No space left on device")
