"""``hdtool convert``: what it prints, where it writes, and what it never replaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdtool.cli.app import run
from hdtool.data.texts_and_traces import RecordReader
from tests.support.logs import ANSWER, ASKED, GOOD


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{GOOD}\n"A text."\n{GOOD[:30]}\n')
    return path


def test_it_counts_what_it_writes(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = log.with_name("chats.jsonl")
    asked = ["convert", str(log), "--out", str(out), "--max-bad-fraction", "0.5", "--quiet"]
    assert run(asked) == 0
    printed = capfd.readouterr()
    said = "1 conversation of 2 turns, 1 of them an answer, 1 plain text, 1 record left out"
    assert printed.out == f"{out}: {said}\n"
    assert printed.err.startswith(f"left out: {log}:3: not valid JSON")
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"id": "1", "messages": [ASKED, ANSWER], "converted_from": f"{log}:1"},
        {"id": "2", "text": "A text.", "converted_from": f"{log}:2"},
    ]
    assert run([*asked, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "file": str(out),
        "conversations": 1,
        "turns": 2,
        "answers": 1,
        "texts": 1,
        "left_out": 1,
    }


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_its_own_file_is_read_and_replaced(ending: str, log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.write_text(GOOD + "\n")
    out = log.with_name(f"chats{ending}")
    for _ in range(2):
        assert run(["convert", str(log), "--out", str(out)]) == 0
    assert out.read_bytes().startswith({"l": b'{"id"', "z": b"\x1f\x8b", "t": b"\x28\xb5"}[ending[-1]])
    assert [record.texts for record in RecordReader([out])] == [("What is a list?", "A sequence.")]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_file_of_others_stays(ending: str, log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file of chats is not one of ``convert``, even if its form is the same."""
    log.write_text(GOOD)
    out = log.with_name(f"mine.jsonl{ending}")
    out.write_text(GOOD)
    assert run(["convert", str(log), "--out", str(out)]) == 1
    assert "is there and is not a file of hdtool convert" in capfd.readouterr().err
    assert out.read_text() == GOOD


def test_a_failure_leaves_the_earlier_file(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = log.with_name("chats.jsonl")
    assert run(["convert", str(log), "--out", str(out), "--max-bad-fraction", "1"]) == 0
    before = out.read_bytes()
    assert run(["convert", str(log), "--out", str(out)]) == 1
    assert "1 of 3 records cannot be used" in capfd.readouterr().err
    assert out.read_bytes() == before
    assert sorted(path.name for path in log.parent.iterdir()) == ["chats.jsonl", "log.jsonl"]


def test_an_input_is_not_written_over(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(log), "--out", str(log)]) == 2
    assert "is one of the inputs: name another file" in capfd.readouterr().err


def test_a_file_without_answers_is_told(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.write_text(json.dumps({"prompt": "What is a list?"}))
    assert run(["convert", str(log), "--out", str(log.with_name("chats.jsonl"))]) == 0
    assert "no answers of a model are in it" in capfd.readouterr().err
