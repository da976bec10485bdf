"""``--history`` and the commands on history stores, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hdtool.cli.app import run
from tests.support.commands import complaint

ASKED = (
    "generate",
    "--prompt",
    "Write a story about a fox.",
    "--max-new-tokens",
    "48",
    "--draft-tokens",
    "16",
    "--json",
)


pytestmark = pytest.mark.usefixtures("known_cost")


@pytest.fixture(autouse=True)
def in_its_own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_history_lasts_is_shown_built_from_and_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = (shown(capfd, *ASKED, "--history", "past") for _ in range(2))
    assert first["output_ids"] == second["output_ids"]
    assert second["steps"] < first["steps"]
    assert second["sources"]["history"]["accepted"] > 0

    listed = shown(capfd, "inspect", "past", "--verify", "--json")
    assert (listed["kind"], listed["entries"], listed["tokens"]) == ("history", 2, 96)
    assert listed["sources"][0]["name"] == "answers"
    assert listed["verified"] == 2
    found = shown(capfd, "inspect", "past", "--after", first["text"].rsplit(" ", 2)[0], "--json")["after"]
    assert found and found[0]["count"] == 2

    built = shown(capfd, "build-model-db", "--from", "past", "--out", "phrases", "--json")
    assert (built["kind"], built["tokens"]) == ("model", 96)
    assert complaint(capfd, "merge", "past", "phrases", "--out", "both").startswith("error: past is a history store")
    assert "choose another place" in complaint(capfd, "build-model-db", "--from", "past", "--out", "past")

    kept = shown(capfd, "drop", "past", "--older-than", "1", "--json")
    assert kept["entries"] == 2
    assert "no source elsewhere" in complaint(capfd, "drop", "past", "--source", "elsewhere")
    assert shown(capfd, "drop", "past", "--source", "answers", "--json")["tokens"] == 0


def test_prompts_of_one_command_draft_from_each_others_answers(capfd: pytest.CaptureFixture[str]) -> None:
    Path("prompts.txt").write_text(f"{ASKED[2]}\n" * 2)
    for history, drafts in (("memory", True), ("none", False)):
        command = ("generate", "--prompts", "prompts.txt", *ASKED[3:], "--history", history, "--json")
        assert run([*command]) == 0
        first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
        assert first["output_ids"] == second["output_ids"]
        assert (second["steps"] < first["steps"]) is drafts


def test_nothing_is_written_unless_asked_for(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    once, never = (shown(capfd, *ASKED, "--history", where) for where in ("memory", "none"))
    assert once["output_ids"] == never["output_ids"]
    assert "history" not in never["sources"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not {"costs", "proofs"} & {*path.parts}]


def test_a_check_reads_the_history_and_writes_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown(capfd, *ASKED, "--history", "past")
    before = {path.name: path.read_bytes() for path in Path("past").iterdir() if not path.name.endswith("-lock")}
    Path("prompts.txt").write_text(f"{ASKED[2]}\n")
    command = ("verify", "--prompts", "prompts.txt", *ASKED[3:], "--quiet")
    cold, warm = (shown(capfd, *command, "--history", where) for where in ("none", "past"))
    assert warm["lossless"] and warm["tokens_per_step"] > cold["tokens_per_step"], "the history was not read"
    assert {p.name: p.read_bytes() for p in Path("past").iterdir() if not p.name.endswith("-lock")} == before
    assert "holds no history store" in complaint(capfd, *command, "--history", "nowhere")
    assert not Path("nowhere").exists()


def test_a_history_at_home_is_found_again(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):
        made = shown(capfd, *ASKED, "--history", "home")
    assert made["sources"]["history"]["accepted"] > 0
    assert len(list((tmp_path / "home").rglob("manifest.json"))) == 1


def test_what_cannot_be_is_refused_in_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert "letter.txt" in complaint(capfd, *ASKED, "--history", "other")
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"
    assert "--history has no effect" in complaint(capfd, *ASKED[:3], "--method", "pld", "--history", "past", code=2)
    assert "--source, or --older-than" in complaint(capfd, "drop", "other", code=2)
    assert "--older-than is for history stores" in complaint(capfd, "drop", "other", "--older-than", "3", code=2)
    assert not (tmp_path / "past").exists()
