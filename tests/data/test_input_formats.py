"""Every example of the page of accepted forms, read as the page says."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hdtool.cli.app import run
from hdtool.data.conversation import ASSISTANT, ROLE_NAMES, TOOL, USER, Turn, message_turns
from hdtool.data.prompts import read_prompts
from hdtool.data.texts_and_traces import read_traces
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "guides" / "input-formats.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, str] = dict(re.findall(r"^`([\w.-]+)`\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
ASKED = {"role": "user", "content": "What is a list?"}
ANSWER = {"role": "assistant", "content": "A sequence."}
TOGETHER = (("question.jsonl", "model_answer.jsonl"), ("batch.jsonl", "batch_output.jsonl"))
"""Examples of two files."""
HALVES = {name for names in TOGETHER for name in names}
WHOLE = [(name,) for name in EXAMPLES if name not in HALVES and name != "notes.jsonl"]


def written(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".db"):
        with closing(sqlite3.connect(path)) as database:
            database.executescript(EXAMPLES[name])
    else:
        path.write_text(EXAMPLES[name], encoding="utf-8")
    return path


def converted(folder: Path, *inputs: str | Path) -> list[dict[str, Any]]:
    out = folder / "converted.out.jsonl"
    assert run(["convert", *map(str, inputs), "--out", str(out), "--quiet"]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 16


@pytest.mark.parametrize("names", [*WHOLE, *TOGETHER], ids=lambda names: names[-1])
def test_an_example_is_a_conversation_for_every_command(
    names: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [written(tmp_path, name) for name in names]
    rows = converted(tmp_path, *paths)
    # The lines of a log and the statements of a database are not records of their own.
    is_file_of_records = names[-1].endswith(".jsonl")
    assert len(rows) == (len(EXAMPLES[names[-1]].splitlines()) if is_file_of_records else 1)
    assert all(row["messages"] == [ASKED, ANSWER] for row in rows)
    assert "left out: " not in capfd.readouterr().err
    for given in (paths, [tmp_path / "converted.out.jsonl"]):
        traces = read_traces(given)
        assert all([answer.message_index for answer in trace.answers] == [1] for trace in traces)
        assert [list(trace.messages) for trace in traces] == [[ASKED, ANSWER]] * len(rows)
    assert all(prompt.messages == (ASKED,) for prompt in read_prompts(paths[0]))


def test_recorded_tokens_are_kept(tmp_path: Path) -> None:
    path = written(tmp_path, "collected.jsonl")
    (row,) = converted(tmp_path, path)
    original = json.loads(path.read_text())
    assert {key: row[key] for key in ("answers", "max_new_tokens", "id")} == {
        key: original[key] for key in ("answers", "max_new_tokens", "id")
    }


def test_texts_stay_texts(tmp_path: Path) -> None:
    rows = converted(tmp_path, written(tmp_path, "notes.jsonl"))
    assert [row["text"] for row in rows] == ["A list is a sequence."] * 2


def test_the_page_names_every_role() -> None:
    for names in ROLE_NAMES.values():
        assert ", ".join(f"`{name}`" for name in names) in PAGE


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(EXAMPLES["chat.jsonl"])
    load = datasets.load_dataset
    asked = []

    def from_folder(name: str, config: str | None, *, split: str) -> Any:
        asked.append((name, config, split))
        return load(str(folder), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    for name in ("hf:owner/name", "hf:owner/name:train", "hf:owner/name/part:train"):
        (row,) = converted(tmp_path, name)
        assert row["messages"] == [ASKED, ANSWER]
    assert [prompt.messages for prompt in read_prompts(Path("hf:owner/name"))] == [(ASKED,)]
    assert asked.pop() == ("owner/name", None, "train")
    assert asked == [("owner/name", None, "train")] * 2 + [("owner/name", "part", "train")]
    assert converted(tmp_path, *(tmp_path / "cache").rglob("*.arrow"))[0]["id"] == "a1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:owner/name:test", 'cannot be loaded (Unknown split "test"'),
        ("hf:name", "is no name of a data set: write it as hf:OWNER/NAME"),
        ("hf:a/b/c/d", "is no name of a data set"),
    ],
)
def test_a_data_set_that_is_none(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text(EXAMPLES["chat.jsonl"])
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda _, config, split: load(str(tmp_path), split=split, cache_dir=str(tmp_path / "cache")),
    )
    assert run(["convert", name, "--out", str(tmp_path / "out.jsonl")]) == 1
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_calls_and_outputs_of_tools_are_turns() -> None:
    """Items of the Responses API that are no messages: calls of functions and free-form tools, and their outputs."""
    items = [
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+b"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Done."},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "sunny"},
    ]
    assert message_turns([ASKED, *items], "input") == [
        Turn(USER, "What is a list?"),
        Turn(ASSISTANT, ""),
        Turn(TOOL, "Done."),
        Turn(ASSISTANT, ""),
        Turn(TOOL, "sunny"),
    ]
