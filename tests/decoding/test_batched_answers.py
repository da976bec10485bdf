"""Batched answers: each equals the answer without a batch, and they are yielded in order."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from hdtool.cli.answer_output import stream_answer
from hdtool.cli.app import run
from hdtool.data.prompts import Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.answering.streamed_answer import Answer
from hdtool.runtime.budget import measure_passes as pass_times
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.drafter_factory import drafters_for
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.generation.text_stream import TextStream
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.methods import DEMO_METHODS, drafter_for
from tests.support.processes import read_until, start

TALKS: list[list[str]] = [
    ["What does `len` do?"],
    ["Name a colour.", "And another one?", "Why that one?"],
    ["Explain `zip` and `map` in Python, with an example of each and of both together."],
    ["Hi"],
    ["Tom has 3 boxes with 12 pencils each. How many pencils does he have?", "And with 4 boxes?"],
]
PROMPTS = [
    Prompt(({"role": "user", "content": first},), tuple(later), f"p{number}")
    for number, (first, *later) in enumerate(TALKS)
]
SAMPLED = SamplingConfig(temperature=0.8, top_k=50, seed=7)
MAX_NEW_TOKENS = 10


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HDTOOL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def told(answers: Iterator[Answer]) -> list[tuple[str, str, list[int], str]]:
    found = []
    for answer in answers:
        text = "".join(answer)
        assert text == answer.text
        assert answer.stats.tokens == len(answer.output_ids)
        assert answer.stats.accepted.sum() == answer.stats.tokens - answer.stats.steps
        found.append((answer.prompt.id, answer.question, answer.output_ids, str(answer.stats.finish)))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[SamplingConfig, Any]:
    """Plain decoding, one prompt after another."""
    plain = DecodeConfig("ar", MAX_NEW_TOKENS)
    return {
        sampling: told(Answerer(ModelConfig(), plain, sampling).all_answers(PROMPTS))
        for sampling in (SamplingConfig(), SAMPLED)
    }


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("known_cost")
@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "size"), [*((method, 3) for method in DEMO_METHODS), ("hd", 2), ("hd", 8)])
def test_every_answer_is_that_of_plain_decoding(
    method: str, size: int, sampling: SamplingConfig, alone: dict[SamplingConfig, Any]
) -> None:
    decoding = DecodeConfig(method, MAX_NEW_TOKENS, batch_size=size, drafter=drafter_for(method))
    answerer = Answerer(ModelConfig(), decoding, sampling)
    for _ in range(2):  # drafters have learned something when they are used again
        assert told(answerer.all_answers(PROMPTS)) == alone[sampling]


@pytest.mark.usefixtures("known_cost")
def test_there_are_as_many_slots_as_drafters() -> None:
    answerer = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=8, batch_size=3), SamplingConfig())
    assert len({id(drafter) for drafter in answerer._drafters}) == 3
    assert {id(answer.request.drafter) for answer in answerer.all_answers(PROMPTS)} == set(map(id, answerer._drafters))


def test_passes_are_timed_once_for_all_slots_and_at_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(target: Target, *arguments: Any, **options: Any) -> Any:
        asked.append(signature(timed).bind(target, *arguments, **options).arguments.get("batch", 1))
        return timed(target, *arguments, **options)

    timed = pass_times.time_tree_passes

    monkeypatch.setattr(pass_times, "time_tree_passes", note)
    target = Target(model_of("llama"))
    drafters = drafters_for(DecodeConfig(batch_size=4), target, StoreSet())
    assert asked and set(asked) == {4}
    timed_passes = len(asked)
    assert len(drafters) == 4
    drafters_for(DecodeConfig(batch_size=4, draft_tokens=8), target, StoreSet())
    assert len(asked) == timed_passes, "nothing is timed for a budget that somebody chose"


@pytest.mark.usefixtures("known_cost")
def test_a_turn_beyond_the_context_fails_as_without_a_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = "word " * 1200
    talks = [["One?", long], ["Two?"]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [*talk]}) + "\n" for talk in (["Zero?"], *talks)))
    errors = []
    for size in ("1", "3"):
        asked = ["generate", "--prompts", str(file), "--max-new-tokens", "8", "--json", "--batch-size", size]
        assert run(asked) == 1
        printed = capfd.readouterr()
        assert [json.loads(line)["prompt"] for line in printed.out.splitlines()] == ["Zero?", "One?"]
        errors.append(printed.err.splitlines()[-1])
    assert errors[0] == errors[1]
    assert errors[0].startswith("error: the prompt is ")


@pytest.mark.usefixtures("known_cost")
def test_generate_prints_the_same_with_and_without_a_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": talk}) + "\n" for talk in TALKS))
    asked = ["generate", "--prompts", str(file), "--max-new-tokens", "12"]
    for options in ([], ["--color"]):
        assert run([*asked, *options]) == 0
        before = capfd.readouterr()
        assert run([*asked, *options, "--batch-size", "3"]) == 0
        after = capfd.readouterr()
        assert re.sub(r"\033\[\d+m", "", after.out) == re.sub(r"\033\[\d+m", "", before.out)
        assert after.err == before.err
    assert run([*asked, "--batch-size", "3", "--stats", "--json"]) == 0
    printed = capfd.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["prompt"] for row in rows] == [turn for talk in TALKS for turn in talk]
    assert all(row["seconds"] > 0 and row["verify_ms_per_step"] > 0 and row["finish"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    assert re.search(rf"in total {tokens:,} tokens in \d+\.\d\d s \(.* tokens/s\), batch size 3\n$", printed.err)


def test_no_batch_is_smaller_than_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "What?", "--batch-size", "0"]) == 2
    assert "--batch-size must be 1 or more, got 0" in capfd.readouterr().err


def collecting(tmp_path: Path, name: str, size: str, length: str = "24") -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": talk}) + "\n" for talk in TALKS))
    asked = ["collect", "--prompts", str(file), "--out", str(tmp_path / name), "--quiet"]
    return [*asked, "--max-new-tokens", length, "--batch-size", size]


@pytest.mark.usefixtures("known_cost")
def test_collected_answers_are_the_same_and_in_order(tmp_path: Path) -> None:
    assert run(collecting(tmp_path, "one.jsonl", "1")) == 0
    assert run(collecting(tmp_path, "three.jsonl", "3")) == 0
    whole = (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "three.jsonl").read_bytes() == whole
    (tmp_path / "three.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run(collecting(tmp_path, "three.jsonl", "2")) == 0
    assert (tmp_path / "three.jsonl").read_bytes() == whole


class Interrupting(Hierarchy):
    """Somebody presses Ctrl-C while it drafts."""

    def __init__(self, after: int) -> None:
        super().__init__(budget=FixedBudget(8))
        self._left = after

    def draft(self, context: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return super().draft(context)


@pytest.mark.usefixtures("known_cost")
def test_after_an_interrupt_unfinished_answers_are_yielded(capsys: pytest.CaptureFixture[str]) -> None:
    answerer = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=60, batch_size=3), SamplingConfig())
    answerer._drafters[1] = Interrupting(after=4)
    answers = []
    for answer in answerer.all_answers(PROMPTS[2:] * 2):
        stream_answer(answer)
        assert answer.output_ids and capsys.readouterr().out == answer.text + "\n"
        answers.append(answer)
    assert [answer.prompt.id for answer in answers] == ["p2", "p3", "p4"]
    assert sum(answer.interrupted for answer in answers) >= 2


@pytest.mark.usefixtures("known_cost")
@pytest.mark.parametrize("color", [False, True])
def test_an_interrupt_before_the_text_of_a_step_leaves_no_token_out(
    color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = itertools.count()

    def add(text: TextStream, ids: Sequence[int]) -> str:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return added(text, ids)

    added = TextStream.add
    monkeypatch.setattr(TextStream, "add", add)
    answerer = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=60, batch_size=1), SamplingConfig())
    (answer,) = answerer.all_answers(PROMPTS[2:3])
    stream_answer(answer, color=color)
    assert answer.interrupted and len(answer.output_ids) > 5
    assert re.sub(r"\033\[\d*m", "", capsys.readouterr().out) == answer.text + "\n"


@pytest.mark.usefixtures("known_cost")
def test_an_interrupt_at_the_end_of_an_answer_begins_no_other_turn() -> None:
    answerer = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=5, batch_size=1), SamplingConfig())
    answers = []
    for answer in answerer.all_answers(PROMPTS[1:]):
        answers.append("".join(answer))
        answer.interrupt()
    assert len(answers) == 1


@pytest.mark.long
@pytest.mark.parametrize("command", [pytest.param("generate", marks=pytest.mark.exhaustive), "collect"])
def test_ctrl_c_ends_a_batch(command: str, tmp_path: Path) -> None:
    asked = collecting(tmp_path, "out.jsonl", "3", length="900")
    if command == "generate":
        asked = ["generate", *asked[1:3], *asked[6:], "--json"]
    with start([sys.executable, "-c", SLOW, *asked]) as process:
        read_until(process, "begun")
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    if command == "generate":
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
        assert rows[-1]["finish"] == "interrupt"
    else:
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert all(answer["finish"] != "interrupt" for row in rows for answer in row["answers"])


SLOW = """
import sys, time
from hdtool.cli.app import main
from hdtool.runtime.core.session import Session
from hdtool.runtime.drafters import drafter_factory
from hdtool.runtime.budget.cost_curve import CostCurve
drafter_factory.cost_curve_for = lambda target, batch: CostCurve.parse("0:1,64:2")
advance = Session.advance
said = []

def slowly(self):
    if not said:
        said.append(print("begun", file=sys.stderr, flush=True))
    time.sleep(0.05)
    return advance(self)

Session.advance = slowly
main()
"""
