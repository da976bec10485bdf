"""Collected answers: every prompt once, whatever happens on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from hdtool.cli.app import run
from hdtool.data import demo
from tests.support.commands import complaint

pytestmark = pytest.mark.usefixtures("known_cost")

PROMPTS = [{"prompt": f"What is {n} + {n}?", "id": f"p{n}"} for n in range(5)] + [
    {"turns": ["One?", "Two?"], "id": "t"}
]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    out = tmp_path / "out" / "generations.jsonl"
    return ["collect", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "6"]


def rows_of(asked: list[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(asked[4]).read_text().splitlines()]


def test_every_prompt_is_answered_once(asked: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(asked) == 0
    rows: Any = rows_of(asked)
    tokens = sum(len(answer["output_ids"]) for row in rows for answer in row["answers"])
    said = [f"{asked[4]}: 7 answers, {tokens} tokens", f"next: hdtool build-model-db --from {asked[4]}"]
    assert capfd.readouterr().err.splitlines()[-2:] == said
    assert [row["id"] for row in rows] == [row["id"] for row in PROMPTS]
    assert rows[0]["model"] == demo.NAME
    turns = rows[-1]["messages"]
    assert isinstance(turns, list)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant"]
    before = Path(asked[4]).read_bytes()
    assert run(asked) == 0
    assert Path(asked[4]).read_bytes() == before
    assert capfd.readouterr().err.splitlines()[-2:] == said
    assert run(said[1].removeprefix("next: hdtool ").split()) == 0


def test_a_line_cut_short_is_answered_again(asked: list[str]) -> None:
    assert run(asked) == 0
    out = Path(asked[4])
    whole = out.read_bytes()
    for kept in (0, 10, len(whole) // 2, len(whole) - 1):
        out.write_bytes(whole[:kept])
        assert run(asked) == 0
        assert out.read_bytes() == whole


def test_answers_of_other_settings_or_prompts_are_not_mixed(
    asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(asked) == 0
    before = Path(asked[4]).read_bytes()
    said = complaint(capfd, *asked, "--seed", "3")
    assert "generations.jsonl:1 was answered with seed 0, not 3: choose another --out" in said
    Path(asked[2]).write_text(json.dumps({"prompt": "Something else?"}))
    assert "answers a different prompt" in complaint(capfd, *asked)
    Path(asked[4]).write_text("a poem\n")
    assert "is not a line of collect" in complaint(capfd, *asked)
    Path(asked[4]).write_bytes(before)


@pytest.mark.parametrize(
    ("given", "other", "said"),
    [
        ("--top-p 0.9", "--top-p 0.5", "top_p 0.9, not 0.5"),
        ("", "--top-k 5", "top_k None, not 5"),
        ("--repetition-penalty 1.2", "", "repetition_penalty 1.2, not None"),
        ("--chat", "", "chat True, not None"),
        ("", "--dtype bfloat16", "dtype auto, not bfloat16"),
        ("", "--quantization q8_0", "quantization None, not q8_0"),
    ],
)
def test_answers_of_every_setting_are_told_apart(
    asked: list[str], given: str, other: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked += ["--temperature", "0.8"]
    assert run([*asked, *given.split()]) == 0
    before = Path(asked[4]).read_bytes()
    refusal = f"generations.jsonl:1 was answered with {said}: choose another --out"
    assert refusal in complaint(capfd, *asked, *other.split())
    assert run([*asked, *given.split()]) == 0
    assert Path(asked[4]).read_bytes() == before


def changed(asked: list[str], content: bytes, capfd: pytest.CaptureFixture[str]) -> str:
    """What is said of a file with this content, which must stay as it is."""
    out = Path(asked[4])
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(content)
    said = complaint(capfd, *asked)
    assert out.read_bytes() == content
    return said


def test_what_is_cut_short_and_of_another_origin_is_kept(
    asked: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(asked) == 0
    capfd.readouterr()
    first, second, *_ = whole = Path(asked[4]).read_bytes().splitlines(keepends=True)
    # Nothing is loaded for a file that cannot go on.
    monkeypatch.setattr(
        "hdtool.runtime.answering.answer_prompts.load", lambda config: pytest.fail("the model is loaded")
    )
    said = changed(asked, b"one line of a novel", capfd)
    assert "generations.jsonl:1 is cut short and is not an answer of collect to the prompt there: remove" in said
    assert "generations.jsonl:2 is cut short" in changed(asked, first + b"one line of a novel", capfd)
    assert "generations.jsonl:2 is cut short" in changed(asked, first + first[:-1], capfd), "of another prompt"
    other = second[:20] + b"#" + second[20:40]
    assert "generations.jsonl:2 is cut short" in changed(asked, first + other, capfd)
    assert "generations.jsonl:7 is cut short" in changed(asked, b"".join(whole) + first[:5], capfd), "one too many"
    assert "generations.jsonl:2 is not a line of collect" in changed(asked, first + b"a poem\n" + second[:9], capfd)


def test_an_empty_file_and_a_link_to_one_are_written(asked: list[str], tmp_path: Path) -> None:
    out = Path(asked[4])
    out.parent.mkdir()
    (tmp_path / "elsewhere.jsonl").touch()
    out.symlink_to(tmp_path / "elsewhere.jsonl")
    assert run(asked) == 0
    assert out.is_symlink() and len((tmp_path / "elsewhere.jsonl").read_text().splitlines()) == len(PROMPTS)


def test_a_folder_is_no_file_of_answers(asked: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Path(asked[4]).mkdir(parents=True)
    assert "generations.jsonl cannot be written (it is a folder)" in complaint(capfd, *asked)


def test_a_lock_file_of_another_origin_is_kept(asked: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Path(asked[4]).parent.mkdir()
    lock = Path(asked[4]).with_name(".generations.jsonl.lock")
    lock.write_text("mine")
    assert "is not a lock file of hdtool" in complaint(capfd, *asked)
    assert lock.read_text() == "mine"


@pytest.mark.parametrize("is_link", [False, True])
def test_two_at_once_are_told_apart(
    is_link: bool, asked: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if one of them writes through a link."""
    out = Path(asked[4])
    out.parent.mkdir()
    if is_link:
        out.symlink_to(tmp_path / "elsewhere.jsonl")
    locked = tmp_path / "elsewhere.jsonl" if is_link else out
    with FileLock(locked.with_name(f".{locked.name}.lock")):
        assert "another collect is writing" in complaint(capfd, *asked)
