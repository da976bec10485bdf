"""Replay: it equals a real run step by step, whatever the method and the number of processes."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

from hdtool.builders.evaluation import parallel_replay
from hdtool.builders.evaluation.parallel_replay import replay
from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader, accept_recorded
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, replay_method
from hdtool.cli.app import run
from hdtool.cli.replay import STEPS_KEYS
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import HdtoolError
from hdtool.data.prompts import read_prompts
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Finish, Step
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.settings.decoding import (
    METHODS,
    NEED_LOGITS,
    TAKE_HISTORY,
    DecodeConfig,
    ReplayConfig,
    StoresConfig,
)
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.bars import counted_bars
from tests.support.processes import HDTOOL, read_until, start, wait_until
from tests.support.trees import tokens_to, trees

SHELF = StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
REPLAYED = ReplayConfig().methods_with(corpus=True)
LIMITS = (24, 60, None, None)
"""Of the answers to four prompts; None is one or two tokens more than the first answer takes."""


# Following a tree -----------------------------------------------------------------------------


@given(trees(5), st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_truth_is_followed_as_far_as_the_tree_holds_it(tree: Any, truth: list[int]) -> None:
    accepted = accept_recorded(tree, truth)
    assert accepted.tokens == truth[: len(accepted.path) + 1]
    assert tree.tokens[accepted.path].tolist() == accepted.tokens[:-1]
    last = accepted.path[-1] if accepted.path else -1
    assert tokens_to(tree, last) == [tree.root, *accepted.tokens[:-1]]
    if len(accepted.tokens) < len(truth):
        assert tree.child(last, accepted.tokens[-1]) is None


# Against real runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(ModelConfig())


@pytest.fixture(scope="module")
def store_set(loaded: Loaded) -> StoreSet:
    return StoreSet.for_tokenizer(loaded.tokenizer, SHELF)


def answered(loaded: Loaded, prompt: list[int], most: int, drafter: Any = None) -> list[Step]:
    sampler = Sampler(SamplingConfig(), prompt)
    steps = decode(loaded.target, prompt, sampler, max_new_tokens=most, stops=loaded.stops, drafter=drafter)
    return list(steps)


@pytest.fixture(scope="module")
def recorded(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's own answers as ``collect`` writes them, cut off, just not cut off, and of two turns."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    rows, ends = [], set()
    for number, (prompt, limit) in enumerate(zip(read_prompts(demo.PROMPTS)[:4], LIMITS, strict=True)):
        messages = list(prompt.messages)
        answers, most = [], limit
        for turn in range(2 if number < 3 else 1):
            ids = encode_conversation(loaded.tokenizer, messages)
            if most is None:
                most = sum(len(step.tokens) for step in answered(loaded, ids, 150)) + number - 1
            steps = answered(loaded, ids, most)
            output = [token for step in steps for token in step.tokens]
            answers.append({"output_ids": output, "finish": steps[-1].finish})
            ends.add(steps[-1].finish)
            messages.append({"role": "assistant", "content": text_of(loaded.tokenizer, output)})
            if turn == 0:
                messages.append({"role": "user", "content": "Once more, please."})
        row = {"id": prompt.id, "category": prompt.category, "max_new_tokens": most}
        rows.append({**row, "messages": messages, "answers": answers})
    assert ends == {Finish.STOP, Finish.LENGTH}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def conversations(loaded: Loaded, recorded: Path) -> list[list[RecordedTurn]]:
    reader = TurnReader(loaded.tokenizer, loaded.stops, loaded.tokenizer.eos_token_id)
    return [reader.turns(trace) for trace in read_traces([recorded])]


@pytest.mark.parametrize(("method", "budget"), [("ar", 0), *((method, 32) for method in REPLAYED), ("hd", 5)])
@pytest.mark.one_in(2)
def test_a_replay_is_a_real_run_step_by_step(
    method: str, budget: int, loaded: Loaded, store_set: StoreSet, conversations: list[list[RecordedTurn]]
) -> None:
    """The default method over all answers, the others over those that are cut off."""
    config = DecodeConfig(method, draft_tokens=budget, lookahead=False)
    drafter = drafter_for(config, loaded.target, store_set)
    parts = conversations if (method, budget) == ("hd", 32) else conversations[:2]
    turns = [turn for conversation in parts for turn in conversation]
    played = replay_method(ReplayMethod(method, config), turns, store_set)
    accepted = 0
    for turn, one in zip(turns, played.turns, strict=True):
        assert turn.max_tokens is not None
        steps = answered(loaded, turn.prompt, turn.max_tokens, drafter)
        assert [token for step in steps for token in step.tokens] == turn.answer == one.tokens.tolist()
        assert [len(step.tokens) for step in steps] == one.accept_lengths.tolist()
        assert [len(step.tree) for step in steps] == one.nodes.tolist()
        assert [source for step in steps for source in step.sources] == one.sources.tolist()
        drafted = np.array([np.bincount(step.tree.sources, minlength=len(SourceId)) for step in steps])
        assert (drafted.sum(axis=0) == one.drafted).all() and ((drafted > 0).sum(axis=0) == one.hits).all()
        accepted += len(turn.answer) - len(steps)
    assert (accepted > 0) == (method != "ar")
    assert played.tokens_per_step == pytest.approx(played.tokens / (played.tokens - accepted))


def test_every_method_is_replayed_or_refused() -> None:
    assert set(REPLAYED) | {"ar", *NEED_LOGITS} == set(METHODS)


# Sums -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(store_set: StoreSet, conversations: list[list[RecordedTurn]]) -> dict[str, ReplayResult]:
    return replay(contenders(), conversations, store_set, workers=1)


def contenders(curve: CostCurve | None = None, budget: int | None = 8) -> list[ReplayMethod]:
    return [
        ReplayMethod(name, DecodeConfig(name, draft_tokens=budget, lookahead=False), curve) for name in ("pld", "hd")
    ]


def test_sums_are_those_of_the_turns(played: dict[str, ReplayResult]) -> None:
    one = played["hd"]
    shares = one.by_source()
    assert sum(share.accepted for share in shares.values()) == one.tokens - one.steps
    assert sum(share.drafted for share in shares.values()) == one.nodes
    assert all(0 <= share.unique <= share.accepted <= share.drafted for share in shares.values())
    assert all(share.hits <= one.drafted_steps for share in shares.values())
    categories = one.by_category()
    assert sum(part.tokens for part in categories.values()) == one.tokens
    assert sum(len(part.turns) for part in categories.values()) == len(one.turns) == 7
    assert one.nodes_per_step <= 8 and 0 < one.draft_us(50) <= one.draft_us(99)


def test_contexts_grow_by_what_was_accepted(
    played: dict[str, ReplayResult], conversations: list[list[RecordedTurn]]
) -> None:
    for one, turn in zip(played["hd"].turns, (turn for turns in conversations for turn in turns), strict=True):
        behind = np.concatenate([[0], np.cumsum(one.accept_lengths)[:-1]]) + len(turn.prompt)
        assert one.contexts.tolist() == behind.tolist()


def test_tokens_per_second_follow_from_the_cost_of_passes(played: dict[str, ReplayResult]) -> None:
    one = played["hd"]
    flat = one.predict(CostCurve((0, 64), ((1e6, 1e6),)))
    assert flat.speedup == pytest.approx(one.tokens_per_step, rel=1e-4)
    assert flat.plain_tokens_per_second == pytest.approx(1e-3)
    curve = CostCurve((0, 8), ((1e6, 3e6), (2e6, 4e6)), (0, 1000))
    seconds = sum(
        curve.seconds(int(nodes), int(context))
        for turn in one.turns
        for nodes, context in zip(turn.nodes, turn.contexts, strict=True)
    )
    assert one.predict(curve).tokens_per_second == pytest.approx(one.tokens / seconds, rel=1e-4)
    assert not one.predict(CostCurve((0, 8), ((1.0, 30.0),))).pays


def test_the_cost_chooses_the_nodes_where_no_budget_does(
    store_set: StoreSet, conversations: list[list[RecordedTurn]]
) -> None:
    dear, cheap = CostCurve((0, 64), ((1.0, 1000.0),)), CostCurve((0, 64), ((1000.0, 1001.0),))
    one, other = (replay(contenders(curve, None), conversations, store_set, workers=1)["hd"] for curve in (dear, cheap))
    assert one.nodes_per_step < 1 < 30 < other.nodes_per_step
    fixed = replay(contenders(dear, 8), conversations, store_set, workers=1)["hd"]
    assert 5 < fixed.nodes_per_step <= 8


# Processes ------------------------------------------------------------------------------------


def counted(played: ReplayResult) -> list[Any]:
    """All of it but the times."""
    return [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(turn).items()}
        | {"draft_seconds": None, "observe_seconds": None}
        for turn in played.turns
    ]


@pytest.mark.long
def test_two_processes_bring_what_one_does(
    store_set: StoreSet,
    conversations: list[list[RecordedTurn]],
    repeated: list[list[RecordedTurn]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_replay, "CONVERSATIONS_PER_JOB", 1)
    bars, every = counted_bars(monkeypatch), [*conversations, *repeated]
    several = [*contenders(), ReplayMethod("remembering", remembering().config)]
    one, two = (replay(several, every, store_set, workers=workers) for workers in (1, 2))
    assert list(one) == list(two) == ["pld", "hd", "remembering"]
    assert all(counted(one[name]) == counted(two[name]) for name in one)
    assert [(bar.position, bar.total) for bar in bars] == [(3 * (7 + 8),) * 2] * 2, "turns of all contenders"
    assert set(two["hd"].source_seconds) == set(one["hd"].source_seconds)
    assert max(steps_of(one["remembering"])[8::2]) < 15, "parts of one conversation would forget"


@pytest.mark.long
def test_a_process_that_is_ended_from_outside(
    store_set: StoreSet, conversations: list[list[RecordedTurn]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fatal(StoreSet):
        def __reduce__(self) -> Any:
            return os._exit, (9,)

    with pytest.raises(HdtoolError, match="ended from outside"):
        replay(contenders(), conversations, Fatal(), workers=2)


def test_each_part_starts_anew(
    store_set: StoreSet, conversations: list[list[RecordedTurn]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_replay, "CONVERSATIONS_PER_JOB", 1)
    parted = replay([remembering(history=False)], conversations, store_set, workers=1)["hd"]
    alone = [replay([remembering(history=False)], [turns], store_set, workers=1)["hd"] for turns in conversations]
    assert counted(parted) == counted(ReplayResult.joined(alone))


# The history ----------------------------------------------------------------------------------


def remembering(*, history: bool = True, name: str = "hd") -> ReplayMethod:
    return ReplayMethod(name, ReplayConfig(draft_tokens=8, history=history).decoding(name))


@pytest.fixture(scope="module")
def repeated() -> list[list[RecordedTurn]]:
    """Conversations of which each second one repeats the answer before to another prompt."""
    rng = np.random.default_rng(0)
    answers = rng.integers(5, 4000, (4, 40)).tolist()
    prompts = rng.integers(5, 4000, (8, 12)).tolist()
    return [[RecordedTurn(str(at), "", 0, prompt, answers[at // 2])] for at, prompt in enumerate(prompts)]


def steps_of(one: ReplayResult) -> list[int]:
    return [len(turn.accept_lengths) for turn in one.turns]


def test_the_history_grows_in_the_order_of_the_recordings(repeated: list[list[RecordedTurn]]) -> None:
    grown = replay([remembering()], repeated, StoreSet(), workers=1)["hd"]
    forgot = replay([remembering(history=False)], repeated, StoreSet(), workers=1)["hd"]
    assert steps_of(forgot) == [40] * 8 and (grown.history, forgot.history) == (True, False)
    assert steps_of(grown)[::2] == [40] * 4, "an answer is not drafted from itself, nor from the warm-up of the replay"
    assert max(steps_of(grown)[1::2]) < 15
    assert all(part.history for part in grown.by_category().values())


def test_every_contender_has_a_history_of_its_own(repeated: list[list[RecordedTurn]]) -> None:
    filled = StoreSet(history=History())
    both = [remembering(), ReplayMethod("again", remembering().config)]
    alone = replay(both[:1], repeated, StoreSet(), workers=1)["hd"]
    for played in (replay(both, repeated, filled, workers=1), replay(both, repeated, filled, workers=1)):
        assert steps_of(played["hd"]) == steps_of(played["again"]) == steps_of(alone)
    assert not len(filled.history.answers) if filled.history else False


def test_what_is_played_before_is_not_counted(
    repeated: list[list[RecordedTurn]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = counted_bars(monkeypatch)
    warm, measured = repeated[::2], repeated[1::2]
    contenders = [remembering(), ReplayMethod("pld", DecodeConfig("pld"))]
    played = replay(contenders, measured, StoreSet(), workers=1, warm=warm)
    assert [len(one.turns) for one in played.values()] == [4, 4]
    assert max(steps_of(played["hd"])) < 15 and steps_of(played["pld"]) == [40] * 4
    assert [one.warm_tokens for one in played.values()] == [160, 0]
    assert bars[-1].position == bars[-1].total == 12
    forgot = replay([remembering(history=False)], measured, StoreSet(), workers=1, warm=warm)["hd"]
    assert steps_of(forgot) == [40] * 4 and forgot.warm_tokens == 160
    replay([remembering(history=False)], measured * 100, StoreSet(), workers=1, warm=warm)
    assert bars[-1].position == bars[-1].total == 400 + 4 * 4


def test_the_weights_are_warm_without_a_history(store_set: StoreSet, conversations: list[list[RecordedTurn]]) -> None:
    contender = remembering(history=False)
    cold, warm = (
        replay([contender], conversations[2:], store_set, workers=1, warm=before)["hd"]
        for before in ((), conversations[:2])
    )
    in_all = replay([contender], conversations, store_set, workers=1)["hd"]
    assert counted(warm) == counted(in_all)[4:] != counted(cold)


def test_a_shelf_opens_its_stores_anew_elsewhere(store_set: StoreSet) -> None:
    again = pickle.loads(pickle.dumps(store_set))
    assert str(again) == str(store_set) and again.model is not store_set.model
    assert str(pickle.loads(pickle.dumps(StoreSet()))) == str(StoreSet())


# The command ----------------------------------------------------------------------------------


@pytest.fixture
def command(home: Path, recorded: Path) -> list[str]:
    return ["replay", "--traces", str(recorded), "--quiet"]


def complaint(capfd: pytest.CaptureFixture[str], arguments: list[str], code: int = 1) -> str:
    """The last line of an expected failure."""
    assert run(arguments) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("error: ") == 1
    return printed.err.splitlines()[-1]


def test_json_has_the_figures_under_their_names(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--json"]) == 0
    printed = capfd.readouterr()
    told = json.loads(printed.out)
    assert list(told["methods"]) == list(REPLAYED)
    assert "without its lookahead branch" in printed.err
    for one in told["methods"].values():
        assert one["tokens_per_step"] == round(one["tokens"] / one["steps"], 3) > 1
        assert 0 < one["nodes_per_step"] <= 64 and 0 < one["draft_us_p50"] <= one["draft_us_p99"]
        assert one["accepted_share"] == pytest.approx(
            (one["tokens"] - one["steps"]) / sum(source["drafted"] for source in one["by_source"].values()), abs=1e-4
        )
        assert set(one["by_category"]) == {"math", "explain", "write", "edit"}
        for share in one["by_source"].values():
            assert set(share) == {"drafted", "accepted", "hits", "unique", "microseconds"}
        assert not {"tokens_per_second", "pays"} & set(one)
    assert set(told["methods"]["hd"]["by_source"]) == {"context", "history", "model", "corpus"}
    assert {name: one["history"] for name, one in told["methods"].items()} == {
        name: "growing" if name in TAKE_HISTORY else "none" for name in REPLAYED
    }
    assert told["warm"] == [] and {one["warm_tokens"] for one in told["methods"].values()} == {0}


@pytest.mark.long
def test_the_output_names_what_the_drafters_knew(
    command: list[str], recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def line(*options: str) -> str:
        assert run([*command, *options]) == 0
        return capfd.readouterr().out.splitlines()[1]

    assert line("--methods", "hd") == "history: growing over the recordings, in their order"
    assert line("--methods", "hd,pld") == "history: growing over the recordings, in their order (hd)"
    assert line("--methods", "hd", "--no-history") == line("--methods", "pld") == "history: none"
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(recorded.read_text())
    report = tmp_path / "report"
    arguments = [*command, "--methods", "hd", "--limit", "2", "--warm", str(earlier)]
    assert run([*arguments, "--json", "--report", str(report)]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["warm"] == [str(earlier)] and told["methods"]["hd"]["warm_tokens"] > 100
    page = (report / "index.html").read_text()
    assert f"warm, {told['methods']['hd']['warm_tokens']} tokens of {earlier} before" in page
    assert run([*arguments, "--no-history"]) == 0
    assert " ".join(capfd.readouterr().out.split()).count("history: none; warm, ") == 1


def test_recordings_are_not_replayed_after_themselves(
    command: list[str], recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(recorded)
    said = complaint(capfd, [*command, "--warm", str(link)], code=2)
    assert f"{recorded} is in --traces and in --warm" in said
    assert "is given twice" in complaint(capfd, [*command, "--traces", str(link)], code=2)
    assert run([*command, "--traces", str(link), "--no-history", "--methods", "hd", "--limit", "1"]) == 0
    capfd.readouterr()
    said = complaint(capfd, [*command, "--warm", "other.jsonl", "--methods", "pld"], code=2)
    assert "--warm has no effect with method pld" in said
    assert "--history has no effect" in complaint(capfd, [*command, "--no-history", "--methods", "pld"], code=2)


def test_a_cost_says_what_pays(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    CostCurve((0, 64), ((1.0, 300.0),), device="an abacus").write(path)
    arguments = [*command, "--methods", "hd-paper,hd", "--cost", str(path)]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["plain"]["tokens_per_second"] == 1000 and told["cost"]["device"] == "an abacus"
    paper = told["methods"]["hd-paper"]
    assert not paper["pays"] and paper["speedup"] == pytest.approx(paper["tokens_per_second"] / 1000, abs=1e-3)
    assert run(arguments) == 0
    words = capfd.readouterr().out
    assert "(an abacus)" in words
    assert re.search(r"^hd-paper: 0\.\d\d times plain decoding: do not use it here$", words, re.MULTILINE)


@pytest.mark.long
def test_the_headline_of_a_report_is_the_default_method(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def lead(*options: str) -> str:
        arguments = [*command, "--limit", "4", "--report", str(tmp_path), *options]
        assert run([*arguments, "--json"]) == 0
        figures = json.loads(capfd.readouterr().out)["methods"]
        text = (tmp_path / "tables.md").read_text()
        (found,) = (line for line in text.splitlines() if "The model did not run" in line)
        page = (tmp_path / "index.html").read_text()
        said = "as many draft tokens a step as pay" if "--cost" in options else "at most 7 draft tokens a step"
        assert said in page
        for name, one in figures.items():
            if name in found.split():
                assert f"{one['tokens_per_step']:.2f} tokens a forward pass" in found
        return found

    steep = ["--cost", "0:1000,1:1010,2:100000,64:300000"]  # drafting takes nothing beside such passes
    assert lead("--methods", "pld,hd", *steep).startswith("hd is predicted to decode 1.")
    loses = lead("--methods", "hd-paper", *steep)
    assert loses.startswith("hd-paper is predicted to decode 0.") and ": drafting does not pay here. The" in loses
    assert lead("--methods", "pld,hd", "--draft-tokens", "7").startswith("hd gets ")


def test_the_tables_fit_a_terminal(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--cost", "0:20,64:30"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("4 conversations, 7 answers, ")
    assert not any("do not draft" in line for line in lines)


def test_steps_are_written_turn_by_turn(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.jsonl"
    assert run([*command, "--methods", "pld", "--methods", "ar", "--steps", str(path), "--limit", "3"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["method"], row["turn"]) for row in rows] == [("pld", 0), ("pld", 1)] * 3 + [("ar", 0), ("ar", 1)] * 3
    for row in rows:
        assert sum(row["accept_lengths"]) == row["tokens"] == len(row["sources"])
        assert len(row["accept_lengths"]) == len(row["nodes"]) == row["steps"]
        assert row["sources"].count("none") == row["steps"]
    capfd.readouterr()
    said = complaint(capfd, [*command, "--methods", "pld", "--steps", str(tmp_path)])
    assert "cannot be written (it is a folder): choose another --steps" in said
    assert set(rows[0]) == set(STEPS_KEYS)
    assert run([*command, "--methods", "ar", "--steps", str(path), "--limit", "1"]) == 0, "its own file is replaced"
    assert len(path.read_text().splitlines()) == 2
    assert run([*command, "--methods", "hd", "--steps", str(path), "--limit", "1"]) == 0
    row = json.loads(path.read_text().splitlines()[0])
    assert (row["history"], row["warm_tokens"]) == ("growing", 0)


@pytest.mark.parametrize("content", ["a line without its end", "two\nlines\n", '{"method": "hd"}\n'])
def test_steps_replace_no_other_file(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(content)
    said = complaint(capfd, [*command, "--methods", "pld", "--steps", str(path)])
    assert "steps.jsonl is there and is not a file of replay --steps: choose another --steps, or move it away" in said
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "magic"], "--method must be one of ar, pld"),
        (["--methods", "pld,hd", "--methods", "pld"], "method pld is given twice"),
        (["--methods", "pld,lade"], "method lade cannot be replayed: it computes with the model"),
        (["--draft-tokens", "65"], "--draft-tokens must be between 0 and 64, got 65"),
        (["--sources", "X"], "--sources must be names from context, history, model"),
        (["--order", "CM"], "--order must be all of CMS, in any order, got CM"),
        (["--workers", "0"], "--workers must be 1 or more, got 0"),
        (["--limit", "0"], "--limit must be 1 or more, got 0"),
    ],
)
def test_bad_usage(options: list[str], said: str, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert said in complaint(capfd, [*command, *options], code=2)


def test_stores_that_do_not_fit(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "method rest drafts from a corpus index" in complaint(
        capfd, [*command, "--methods", "rest", "--corpus-db", "none"]
    )
    assert run([*command, "--corpus-db", "none", "--json"]) == 0
    assert "rest" not in json.loads(capfd.readouterr().out)["methods"]
    other = tmp_path / "other"
    load_and_change(other)
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": role, "content": "hi"} for role in ("user", "assistant")]}))
    arguments = ["replay", "--traces", str(chat), "--model", str(other), "--model-db", str(demo.MODEL_STORE)]
    assert "tokenizer" in complaint(capfd, arguments)
    assert "cannot be read" in complaint(capfd, [*command, "--cost", "none.json"])


def load_and_change(folder: Path) -> None:
    tokenizer = load(ModelConfig()).tokenizer
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)


def test_conversations_without_answers_are_told(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert run([*command, "--traces", str(lonely), "--methods", "pld"]) == 0
    assert "left out: 1 of 5 conversations, which hold no answer" in capfd.readouterr().err


@pytest.fixture
def many(recorded: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "many.jsonl"
    path.write_text(recorded.read_text() * 500)
    yield path


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals work differently there")
@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
def test_ctrl_c_ends_it(workers: str, many: Path, tmp_path: Path) -> None:
    arguments = ["replay", "--traces", str(many), "--methods", "hd", "--no-history", "--workers", workers]
    environment = {**os.environ, "HDTOOL_HOME": str(tmp_path)}
    with start([*HDTOOL, *arguments], start_new_session=True, env=environment) as process:
        read_until(process, "drafting from ")
        if workers == "2":
            wait_until(process, lambda: len(psutil.Process(process.pid).children()) >= 2)
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted"


def test_rows_that_cannot_be_replayed_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Requests of a server, one of which was cut off, in a folder of logs."""
    asked = {"role": "user", "content": "What is a list?"}
    row = {"request": {"messages": [asked]}, "response": {"choices": [{"message": {"content": "A sequence."}}]}}
    path = tmp_path / "log.jsonl"
    path.write_text((json.dumps(row) + "\n") * 3 + json.dumps(row)[:50])
    arguments = ["replay", "--traces", str(tmp_path), "--methods", "pld", "--json", "--quiet"]
    assert run([*arguments, "--max-bad-fraction", "0.3"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["methods"]["pld"]["turns"] == 3
    assert f"left out: {path}:4: not valid JSON" in printed.err
    assert run(arguments) == 1
    assert f"error: 1 of 4 records cannot be used, the first at {path}:4 (not valid" in capfd.readouterr().err
