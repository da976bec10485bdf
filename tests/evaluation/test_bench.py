"""``hdtool bench``: who is asked what and when, what counts, and what a user can get wrong."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hdtool.builders.evaluation.bench import Bench, questions_hash
from hdtool.builders.evaluation.bench_plan import WARM_UP_PROMPTS, BenchPlan, ContenderFactory, warm_up_questions
from hdtool.builders.evaluation.contenders import GenerateContender
from hdtool.builders.evaluation.experiment import rotated
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.bench_results import read_results
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError, PromptError
from hdtool.data.prompts import Prompt, interleave_categories, interleave_tasks, read_prompts, tasks_of
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.kernels.linear_layers import has_compiled_layers
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.measuring import PEERS, BenchConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from tests.support.bars import counted_bars
from tests.support.commands import complaint
from tests.support.processes import HDTOOL, start, wait_until
from tests.support.spec_bench_answers import turn_of

QUICK = ["--num-prompts", "4", "--max-new-tokens", "24", "--warm-up", "0", "--quiet"]


def question(name: str, category: str = "qa", *later: str) -> Prompt:
    return Prompt(({"role": "user", "content": f"question {name}"},), later, name, category)


# Who is asked what and when --------------------------------------------------------------------


class Scripted:
    """A contender that notes what it is asked, and takes the seconds that it is told to."""

    def __init__(
        self, name: str, log: list[tuple[str, str]], loaded: Loaded, seconds: list[float] | None = None
    ) -> None:
        self._name = name
        self._log = log
        self._tokenizer = loaded.tokenizer
        self._seconds = iter(seconds or [])

    def fresh(self) -> Scripted:
        return self

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        self._log.append((self._name, str(self._tokenizer.decode(prompt))))
        said = turn_of([2, 1], next(self._seconds, 1.0))
        return replace(said, text=f"{self._name} says {len(self._log)}")


def asked_of(log: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Who was asked which question, turns apart."""
    return [(name, text.split("question ")[1].split("<")[0].strip()) for name, text in log]


def test_all_are_asked_in_turn_and_another_one_begins_each_time(embedded: Loaded) -> None:
    log: list[tuple[str, str]] = []
    bench = Bench(embedded, {name: Scripted(name, log, embedded) for name in "abc"}, max_new_tokens=8)
    answers = list(bench.answers([question("1"), question("2"), question("3"), question("4")]))
    assert [list(found) for found in answers] == [["a", "b", "c"]] * 4
    assert [found["a"].question_id for found in answers] == [1, 2, 3, 4]
    order = "".join(name for name, _ in log)
    assert order == "abc" + "bca" + "cab" + "abc"
    assert [text for _, text in asked_of(log)] == [name for name in "1234" for _ in range(3)]
    log.clear()
    list(bench.answers([question("1"), question("2"), question("3")], done=2))
    assert "".join(name for name, _ in log) == "cab", "a run that goes on keeps the order"


def test_the_first_answer_has_its_prediction(embedded: Loaded) -> None:
    class Noting(Scripted):
        def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
            predicted.append(str(embedded.tokenizer.decode(list(prediction))))
            return super().answer(prompt, guide, prediction)

    predicted: list[str] = []
    asked = [replace(question("1", "qa", "question 2"), prediction="a likely answer"), question("3")]
    list(Bench(embedded, {"a": Noting("a", [], embedded)}, max_new_tokens=8).answers(asked))
    assert predicted == ["a likely answer", "", ""]
    assert questions_hash(asked) != questions_hash([replace(asked[0], prediction="another"), asked[1]])


def test_rounds_turn_as_well_and_the_one_of_median_speed_counts(embedded: Loaded) -> None:
    """With two rounds, the slower answer counts."""
    log: list[tuple[str, str]] = []
    contenders = {
        "a": Scripted("a", log, embedded, [5.0, 1.0, 3.0]),
        "b": Scripted("b", log, embedded, [1.0, 1.0, 2.0]),
    }
    bench = Bench(embedded, contenders, max_new_tokens=8, rounds=3)
    (found,) = bench.answers([question("1")])
    assert "".join(name for name, _ in log) == "abbaab"
    assert [turn.seconds for turn in found["a"].turns] == [3.0]
    assert found["a"].seconds_rounds == ((5.0,), (1.0,), (3.0,))
    assert [turn.seconds for turn in found["b"].turns] == [1.0]
    (found,) = Bench(embedded, {"a": Scripted("a", log, embedded, [1.0, 2.0])}, 8, rounds=2).answers([question("1")])
    assert found["a"].turns[0].seconds == 2.0


def test_later_turns_follow_ones_own_answers(embedded: Loaded) -> None:
    log: list[tuple[str, str]] = []
    bench = Bench(embedded, {name: Scripted(name, log, embedded) for name in "ab"}, max_new_tokens=8)
    (found,) = bench.answers([question("1", "qa", "and then?", "and at last?")])
    assert [name for name, _ in log] == ["a"] * 3 + ["b"] * 3
    last = dict(log)
    assert "a says 1" in last["a"] and "a says 2" in last["a"] and "b says" not in last["a"]
    assert "b says 4" in last["b"] and "b says 5" in last["b"] and "and at last?" in last["b"]
    assert [turn.text for turn in found["b"].turns] == ["b says 4", "b says 5", "b says 6"]


def test_a_later_turn_out_of_context_is_no_answer(embedded: Loaded) -> None:
    bench = Bench(embedded, {"a": Scripted("a", [], embedded)}, max_new_tokens=8)
    (found,) = bench.answers([question("1", "qa", "again and again " * 600, "more?")])
    first, *others = found["a"].turns
    assert first.seconds == 1.0
    assert [(turn.text, turn.output_ids, turn.seconds, turn.finish) for turn in others] == [
        ("", [], 0.0, "context")
    ] * 2
    assert found["a"].tokens_per_second == 3.0


def test_warming_up_asks_all_contenders(embedded: Loaded) -> None:
    log: list[tuple[str, str]] = []
    bench = Bench(embedded, {name: Scripted(name, log, embedded) for name in "ab"}, max_new_tokens=8)
    bench.warm_up([question("1"), question("2")])
    assert asked_of(log) == [("a", "1"), ("b", "1"), ("a", "2"), ("b", "2")]


def test_the_warm_up_takes_questions_that_are_not_measured_of_different_categories(embedded: Loaded) -> None:
    bench = Bench(embedded, {}, max_new_tokens=8)
    measured = [question("1", "x"), question("2", "y")]
    again = replace(question("1", "z"), id="3")
    long = replace(question("4", "z"), messages=({"role": "user", "content": "word " * 2000},))
    spare = [again, long, question("5", "x"), question("6", "x"), question("7", "y"), question("8", "z")]

    def ids(spare: list[Prompt], count: int, measured: list[Prompt] = measured) -> list[str]:
        return [one.id for one in warm_up_questions(measured, spare, count, bench.fits)]

    assert ids(spare, 3) == ["5", "7", "8"]
    assert ids(spare, 5) == ["5", "7", "8", "6", "warm-up 1"]
    assert ids([], 6) == ["warm-up 1", "warm-up 2", "warm-up 3", "warm-up 4", "warm-up 1", "warm-up 2"]
    assert ids([], 2, [replace(question("1"), messages=({"role": "user", "content": WARM_UP_PROMPTS[0]},))]) == [
        "warm-up 2",
        "warm-up 3",
    ]
    assert ids(spare, 0) == []


@pytest.mark.parametrize("sample", [["--num-prompts", "2"], ["--num-prompts-per-task", "1"], []])
def test_no_question_of_the_warm_up_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: list[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    rows = [{"question_id": name, "category": category, "turns": [f"question {name}"]} for name, category in FILE]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmed: list[str] = []
    monkeypatch.setattr(Bench, "warm_up", lambda self, asked, _: warmed.extend(one.id for one in asked))
    few = ["--methods", "ar", "--max-new-tokens", "4", "--warm-up", "3", "--quiet", "--threads", "1"]
    assert run(["bench", "--questions", str(file), "--out", str(tmp_path / "out"), *few, *sample]) == 0
    measured = [str(one.question_id) for one in read_results(tmp_path / "out").answers["ar"]]
    assert measured == (["1", "3"] if sample else ["1", "2", "3", "4", "5"])
    assert warmed == (["2", "4", "5"] if sample else ["warm-up 1", "warm-up 2", "warm-up 3"])


FILE = (("1", "x"), ("2", "x"), ("3", "y"), ("4", "y"), ("5", "x"))


# What drafters know ----------------------------------------------------------------------------


class Learner:
    """A contender that keeps the prompts that it answered; ``every`` holds those of all."""

    def __init__(self, every: list[list[str]], loaded: Loaded) -> None:
        self._every, self._loaded = every, loaded
        self._asked: list[str] = []
        every.append(self._asked)

    def fresh(self) -> Learner:
        return Learner(self._every, self._loaded)

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        self._asked.append(str(self._loaded.tokenizer.decode(prompt)).split("question ")[1].split("<")[0].strip())
        return turn_of([2, 1], 1.0)


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [("cold", [["1"], ["2"]] + [[name] for name in "123" for _ in range(2)]), ("warm", [["1"], ["2"], *["123"] * 2])],
)
def test_no_drafter_answers_a_question_twice(embedded: Loaded, drafters: str, expected: list[Any]) -> None:
    every: list[list[str]] = []
    bench = Bench(embedded, {"a": Learner(every, embedded)}, max_new_tokens=8, rounds=2, drafters=drafters)
    questions = [question(name, name) for name in "123"]
    bench.check(questions)
    bench.warm_up(questions[:2])
    assert len(list(bench.answers(questions))) == 3
    assert sorted(asked for asked in every if asked) == sorted(list(names) for names in expected)


def test_turns_of_a_question_have_one_drafter(embedded: Loaded) -> None:
    every: list[list[str]] = []
    bench = Bench(embedded, {"a": Learner(every, embedded)}, max_new_tokens=8)
    list(bench.answers([question("1", "qa", "later"), question("2")]))
    assert [asked for asked in every if asked] == [["1", "1"], ["2"]]


def test_equal_questions_are_refused_for_warm_drafters(embedded: Loaded) -> None:
    equal = [question("1", "x"), question("2", "x"), replace(question("1", "y"), id="3")]
    Bench(embedded, {}, max_new_tokens=8).check(equal)
    with pytest.raises(PromptError, match="questions 1 and 3 are equal, and warm drafters would know the answer"):
        Bench(embedded, {}, max_new_tokens=8, drafters="warm").check(equal)


def test_only_warm_drafters_know_earlier_answers_and_none_knows_its_own(embedded: Loaded) -> None:
    """With the method that drafts most, and two questions with the same answer."""
    asked = [
        replace(question(name), messages=({"role": "user", "content": f"def add(a, b):{end}"},))
        for name, end in (("1", ""), ("2", " "))
    ]
    decoding = DecodeConfig(draft_tokens=8, max_new_tokens=32)
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), decoding, SamplingConfig())

    def steps(drafters: str, rounds: int, warm_up: int, questions: list[Prompt]) -> list[list[list[int]]]:
        """For each question, the tokens of each step of each round."""
        every: list[list[list[int]]] = []

        class Noted(Bench):
            def _answered(self, *arguments: Any) -> Any:
                found = super()._answered(*arguments)
                noted.append([tokens for turn in found for tokens in turn.step_tokens])
                return found

        bench = Noted(embedded, lineup.contenders(["hd"]), 32, False, rounds, drafters)
        noted: list[list[int]] = []
        bench.warm_up(questions[:warm_up])
        noted.clear()
        for _ in bench.answers(questions):
            every.append(noted.copy())
            noted.clear()
        return every

    (first,), (second,) = cold = steps("cold", 1, 0, asked)
    assert steps("cold", 3, 2, asked) == [[first] * 3, [second] * 3]
    (_, (known,)) = steps("warm", 1, 0, asked)
    assert len(known) < len(second), "the answer to the first question helps"
    assert steps("warm", 3, 2, asked) == [[first] * 3, [known] * 3]
    contender = lineup.contenders(["hd"])["hd"]
    ids = embedded.tokenizer(asked[0].messages[0]["content"])["input_ids"]
    one, again = (len(contender.answer(ids).step_tokens) for _ in range(2))
    assert len(cold[0][0]) == one > again, "a drafter that answers twice would flatter"


def test_a_limit_takes_of_all_categories_in_turn() -> None:
    every = [question("1", "x"), question("2", "x"), question("3", "y"), question("4", "x"), question("5", "z")]
    assert [one.id for one in interleave_categories(every, 4)] == ["1", "3", "5", "2"]
    assert [one.id for one in interleave_categories(every, 99)] == ["1", "3", "5", "2", "4"]


def test_a_number_for_each_task_pools_mt_bench() -> None:
    names = [("w1", "writing"), ("w2", "writing"), ("m1", "math"), ("q1", "qa"), ("q2", "qa"), ("m2", "math")]
    every = [question(name, category) for name, category in [*names, ("q3", "qa"), ("r1", "rag")]]
    assert [one.id for one in interleave_tasks(every, 3)] == ["w1", "q1", "r1", "m1", "q2", "w2", "q3"]
    assert [one.id for one in interleave_tasks(every, 1)] == ["w1", "q1", "r1"]
    assert tasks_of(["math", "edit"]) == ["math", "edit"], "math alone is no part of MT-bench"
    assert tasks_of(["math", "qa", "stem"]) == ["mt_bench", "qa", "mt_bench"]


def test_questions_are_told_apart_by_all_that_is_asked() -> None:
    one = question("1", "qa", "later")
    others = [question("2", "qa", "later"), question("1", "rag", "later"), question("1", "qa")]
    assert len({questions_hash([other]) for other in (one, *others)}) == 4
    assert questions_hash([one]) == questions_hash([question("1", "qa", "later")])
    assert rotated("abc", 4) == ["b", "c", "a"]


def test_a_question_that_cannot_be_asked_is_named_before_any_is(embedded: Loaded) -> None:
    bench = Bench(embedded, {}, max_new_tokens=8)
    with pytest.raises(PromptError, match=r"question 2: the prompt is .* tokens long"):
        bench.check([question("1"), replace(question("2"), messages=({"role": "user", "content": "word " * 2000},))])
    raw = Bench(embedded, {}, max_new_tokens=8, chat=False)
    raw.check([question("1")])
    with pytest.raises(PromptError, match="question 2: a conversation of 3 messages needs a chat template"):
        raw.check([question("1"), question("2", "qa", "a later turn")])


# What is measured ------------------------------------------------------------------------------


@pytest.mark.long
def test_everybody_says_the_same_on_the_embedded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ("generate", "generate-pld", "generate-assisted", "ar", "pld")
    asked = ["bench", "--methods", ", ".join(methods), "--assistant", str(demo.MODEL), "--out", str(tmp_path), *QUICK]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["baseline"], told["reference"], told["questions"]) == ("generate", "ar", 4)
    assert list(told["tasks"]) == ["math", "explain", "write", "edit", "overall"]
    overall = told["tasks"]["overall"]
    assert {score["identical"] for score in overall.values()} == {4}
    assert overall["generate"]["tokens_per_step"] == overall["ar"]["tokens_per_step"] == 1.0
    assert overall["generate-assisted"]["tokens_per_step"] > 2, "the model guesses itself well"
    assert overall["generate-pld"]["tokens_per_step"] > 1
    assert overall["pld"]["draft_us_per_step"] > 0 and overall["generate-pld"]["draft_us_per_step"] is None
    results = read_results(tmp_path)
    for method, answers in results.answers.items():
        assert sum(map(len, (turn.output_ids for one in answers for turn in one.turns))) > 0
        for turn in (turn for one in answers for turn in one.turns):
            assert sum(turn.step_tokens) == len(turn.output_ids) <= 24 and turn.seconds > 0
            assert turn.finish in ("stop", "length")
            assert (turn.nodes > 0) == (method not in ("generate", "ar") and len(turn.step_tokens) > 1)
            assert len(turn.drafted_by) == (0 if method in PEERS else len(turn.output_ids))
    speeds = [
        sum(row["choices"][0]["new_tokens"]) / sum(row["choices"][0]["wall_time"])
        for row in map(json.loads, (tmp_path / "pld.jsonl").read_text().splitlines())
    ]
    assert overall["pld"]["tokens_per_second"] == pytest.approx(fmean(speeds), abs=1e-3)
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["methods"] == list(methods)
    assert kept["surroundings"]["model"] == demo.NAME
    assert kept["surroundings"]["stores"] == {}, "none of these draws on any"


@pytest.mark.parametrize("name", ["generate", "generate-pld", "ar", "hd"])
def test_an_answer_has_wall_and_cpu_time_and_that_of_its_first_token(embedded: Loaded, name: str) -> None:
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=12), SamplingConfig())
    contender = lineup.contenders([name])[name]
    turn = contender.answer(embedded.tokenizer("def add(a, b):")["input_ids"])
    assert turn.first_seconds and turn.cpu_seconds and turn.waited_seconds is not None
    assert 0 < turn.first_seconds < turn.seconds
    if isinstance(contender, GenerateContender):
        assert not contender._model._forward_hooks, "no hook runs in later passes"


def test_all_run_with_one_number_of_threads_also_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is chosen once: runs at other temperatures, and an interrupted run, take it over."""
    chosen: list[int | None] = []

    def choose(self: ContenderFactory, names: Sequence[str], wanted: int | None) -> None:
        chosen.append(wanted)

    monkeypatch.setattr(ContenderFactory, "choose_threads", choose)
    monkeypatch.setattr("hdtool.builders.evaluation.report.pages.check_report_folder", lambda folder: None)
    monkeypatch.setattr("hdtool.cli.result_tables.write_report", lambda *_: None)
    command = ["bench", "--methods", "ar", "--out", str(tmp_path), *QUICK, "--max-new-tokens", "2"]
    temperatures = ["--temperatures", "0.5", "--report", str(tmp_path / "report")]
    assert run([*command, *temperatures]) == 0
    assert chosen == [None, 1]
    assert f"threads of every method: {torch.get_num_threads()}" in " ".join(capsys.readouterr().out.split())
    rows = (tmp_path / "ar.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ar.jsonl").write_text("".join(rows[:2]))
    assert run([*command, *temperatures]) == 0
    assert chosen == [None, 1, 1]


def test_drawn_answers_are_ours_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "--methods", "generate,generate-pld,ar,pld", "--out", str(tmp_path), *QUICK]
    assert run([*asked, "--temperature", "0.8", "--seed", "5", "--json"]) == 0
    overall = json.loads(capsys.readouterr().out)["tasks"]["overall"]
    assert [score["identical"] for score in overall.values()] == [None, None, 4, 4]
    answers = read_results(tmp_path).answers
    assert any(
        drawn.output_ids != ours.output_ids for drawn, ours in zip(answers["generate"], answers["ar"], strict=True)
    )


class Puts(BaseStreamer):
    """How many tokens ``generate`` hands over at a time, the prompt first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Any) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", ["generate-pld", "generate-assisted"])
@pytest.mark.one_in(2)
def test_steps_of_the_library_are_counted_as_it_takes_them(embedded: Loaded, name: str) -> None:
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=40), SamplingConfig())
    contender = lineup.contenders([name], str(demo.MODEL))[name]
    assert isinstance(contender, GenerateContender)
    for prompt in interleave_categories(read_prompts(demo.PROMPTS), 2):
        ids = encode_conversation(embedded.tokenizer, prompt.messages)
        found = contender.answer(ids)
        puts = Puts()
        contender._drafting["streamer"] = puts
        contender.answer(ids)
        del contender._drafting["streamer"]
        assert puts.sizes[0] == len(ids)
        if name == "generate-pld":  # an assistant may guess another number of tokens the next time
            assert found.step_tokens == puts.sizes[1:]
        assert sum(found.step_tokens) == len(found.output_ids) and min(found.step_tokens) >= 1
        assert found.nodes >= len(found.output_ids) - len(found.step_tokens)


def test_the_library_runs_on_weights_as_its_users_have_them(embedded: Loaded) -> None:
    """Layers of CPU models multiply otherwise for our own methods; a peer that ran on those would be another one."""
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(), SamplingConfig())
    peer = lineup.contenders(["generate"])["generate"]
    assert isinstance(peer, GenerateContender)
    assert not has_compiled_layers(peer._model)
    assert has_compiled_layers(embedded.target.model)
    for theirs, own in zip(peer._model.parameters(), embedded.target.model.parameters(), strict=True):
        assert torch.equal(theirs, own)


def test_an_assistant_of_a_padded_vocabulary_is_taken(embedded: Loaded, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    model.resize_token_embeddings(4160)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(tmp_path)
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=16), SamplingConfig())
    contenders = lineup.contenders(["ar", "generate-assisted"], str(tmp_path))
    ids = embedded.tokenizer("def add(a, b):")["input_ids"]
    plain, assisted = (contender.answer(ids).output_ids for contender in contenders.values())
    assert plain == assisted


def test_an_assistant_of_another_vocabulary_is_refused(embedded: Loaded, tmp_path: Path) -> None:
    shutil.copytree(demo.MODEL, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "other")
    lineup = ContenderFactory(embedded, StoreSet(), ModelConfig(), DecodeConfig(), SamplingConfig())
    with pytest.raises(ModelError, match=r"cannot assist hdtool-demo: its tokenizer is another one \(4,097 tokens"):
        lineup.contenders(["generate-assisted"], str(tmp_path / "other"))


# Going on --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_killed_bench_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--max-new-tokens", "8", "--threads", "1"]
    arguments = ["bench", "--methods", "ar,pld", "--out", str(tmp_path), *QUICK, *few]
    last = tmp_path / "pld.jsonl"

    def size() -> int:
        return last.stat().st_size if last.exists() else 0

    for pause in (0.0, 0.02):
        before = size()
        with start([*HDTOOL, *arguments]) as process:
            wait_until(process, lambda before=before: size() > before)  # type: ignore[misc]
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
    kept = last.read_bytes().splitlines(keepends=True)[: len(read_results(tmp_path).answers["pld"])]
    assert kept
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["overall"]["pld"]["identical"] == 4
    results = read_results(tmp_path)
    assert results.complete and last.read_bytes().startswith(b"".join(kept))
    asked = [one.id for one in interleave_categories(read_prompts(demo.PROMPTS), 4)]
    assert [[one.question_id for one in rows] for rows in results.answers.values()] == [asked, asked]


def test_what_is_complete_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--methods", "ar", "--out", str(tmp_path), *QUICK]
    assert run(arguments) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(
        "hdtool.builders.evaluation.bench_plan.load", lambda config: pytest.fail("the model is loaded again")
    )
    assert run(arguments) == 0
    assert capsys.readouterr().out == first
    assert run([*arguments, "--baseline", "ar"]) == 0


def test_other_settings_go_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "ar", "--out", str(tmp_path), *QUICK]
    assert run(["bench", *arguments]) == 0
    capfd.readouterr()
    assert f"{tmp_path} holds a run with max-new-tokens 24, not 25" in complaint(
        capfd, "bench", *arguments, "--max-new-tokens", "25"
    )
    assert "holds a run over other questions: choose another --out" in complaint(
        capfd, "bench", *arguments, "--num-prompts", "5"
    )
    assert "with methods ar, not ar,pld" in complaint(capfd, "bench", *arguments, "--methods", "pld")
    assert "with drafters cold, not warm" in complaint(capfd, "bench", *arguments, "--memory", "warm")


def test_progress_counts_each_turn_of_each_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [question("1", "qa", "a later turn"), question("2")]
    bench = BenchConfig(("ar", "pld"), out=str(tmp_path), warm_up=1, rounds=2)
    plan = BenchPlan(asked, bench, decoding=DecodeConfig(max_new_tokens=2), spare=[question("3")])
    bars = counted_bars(monkeypatch)
    plan.results()
    turns = 2 * (1 + 2 * (2 + 1))  # of two contenders: a warm-up, and two rounds of two questions
    assert (bars[-1].position, bars[-1].total) == (turns, turns)


def test_the_table_and_the_record_name_the_drafters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for drafters in ("cold", "warm"):
        arguments = ["bench", "--methods", "ar", "--out", str(tmp_path / drafters), *QUICK, "--memory", drafters]
        assert run([*arguments, "--json"]) == run(arguments) == 0
        told, table = capfd.readouterr().out.split("\n", 1)
        assert json.loads(told)["drafters"] == drafters
        assert f"\nmemory: {drafters}, " in table


def test_a_bench_of_before_is_opened_and_not_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "ar", "--out", str(tmp_path), *QUICK]
    assert run(["bench", *arguments]) == 0
    kept = json.loads((tmp_path / "run.json").read_text())
    for name in ("drafters", "history", "history_prompts"):
        del kept["options"][name]
    (tmp_path / "run.json").write_text(json.dumps(kept))
    capfd.readouterr()
    assert run(["bench", *arguments, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["drafters"] is None
    assert run(["bench", *arguments]) == 0
    assert "memory: warm, with the weights of the questions before, without a history" in capfd.readouterr().out
    answers = tmp_path / "ar.jsonl"
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:2]))
    assert "holds an incomplete run of an hdtool without --" in complaint(capfd, "bench", *arguments)


@pytest.mark.parametrize("name", ["ar.jsonl", "run.json"])
def test_files_of_another_origin_are_refused_before_the_model_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("one line of a novel")
    monkeypatch.setattr("hdtool.builders.evaluation.bench_plan.load", lambda config: pytest.fail("the model is loaded"))
    assert f"error: {tmp_path / name} " in complaint(capfd, "bench", "--methods", "ar", "--out", str(tmp_path), *QUICK)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "one line of a novel"


def test_two_at_once_are_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"):
        said = complaint(capfd, "bench", "--methods", "ar", "--out", str(tmp_path), *QUICK)
    assert f"another bench is writing {tmp_path}: wait for it" in said


# What a user can get wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--out", "{out}/file"], "cannot be written", 1),
        (["--questions", "no-such.jsonl"], "no-such.jsonl does not exist", 1),
        (["--methods", "ar,warp"], "--methods must be names from generate, generate-pld", 2),
        (["--methods", ""], "--methods must be names", 2),
        (["--methods", "ar,ar"], "each method at most once", 2),
        (["--methods", "generate-assisted"], "a draft model for generate-assisted", 2),
        (
            ["--methods", "ar", "--assistant", "x"],
            "--assistant must be left out without the method generate-assisted",
            2,
        ),
        (["--methods", "ar", "--baseline", "pld"], "--baseline must be one of ar, got pld", 2),
        (["--num-prompts-per-task", "0"], "--num-prompts-per-task must be 1 or more, got 0", 2),
        (["--num-prompts-per-task", "2"], "--num-prompts-per-task must be left out with --num-prompts, got 2", 2),
        (["--num-prompts", "0"], "--num-prompts must be 1 or more, got 0", 2),
        (["--memory", "hot"], "--memory must be cold or warm, got hot", 2),
        (["--rounds", "0"], "--rounds must be 1 or more, got 0", 2),
        (["--warm-up", "-1"], "--warm-up must be 0 or more, got -1", 2),
        (["--threads", "0"], "--threads must be 1 or more, got 0", 2),
        (["--temperature", "-1"], "--temperature must be 0 (greedy) or more, got -1", 2),
        (["--draft-tokens", "65"], "--draft-tokens must be between 0 and 64, got 65", 2),
        (["--dtype", "float7"], "--dtype must be one of", 2),
        (["--model", "no/such/model"], "no/such/model does not exist", 1),
        (["--methods", "hd", "--corpus-db", "nowhere"], "nowhere holds no store", 1),
        (["--methods", "ar,rest", "--corpus-db", "none"], "method rest drafts from a corpus index", 1),
        (["--baseline", "generate-assisted"], "which is not measured here: name one of generate, generate-pld, ar", 2),
    ],
)
def test_mistakes_are_told_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str, code: int
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [argument.replace("{out}", str(tmp_path)) for argument in arguments]
    assert said in complaint(capfd, "bench", "--out", str(tmp_path / "out"), *QUICK, *arguments, code=code)


def test_all_that_can_run_runs() -> None:
    config = BenchConfig()
    assert "rest" not in config.chosen(has_corpus=False) and "rest" in config.chosen(has_corpus=True)
    assert config.chosen(has_corpus=True)[:2] == ("generate", "generate-pld")
    assert "generate-assisted" in BenchConfig(assistant="x").chosen(has_corpus=False)


def test_settings_that_change_nothing_are_not_compared() -> None:
    plan = BenchPlan([question("1")])
    free = replace(plan, bench=BenchConfig(baseline="ar", out="elsewhere"))
    assert plan.options() == free.options()
    other = replace(plan, sampling=SamplingConfig(seed=1))
    assert plan.options() != other.options()
    assert json.loads(json.dumps(plan.options())) == plan.options()
