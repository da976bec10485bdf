"""``hdtool setup``: the split of the logs, its stages, how it goes on after an interruption, and the verdict."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hdtool.builders.evaluation.contenders import DraftingContender
from hdtool.builders.evaluation.replay import ReplayedTurn, ReplayResult
from hdtool.builders.evaluation.verify import Verifier
from hdtool.builders.setup import held_out_answers, stages
from hdtool.builders.setup.held_out_answers import answer_prompts
from hdtool.builders.setup.held_out_choice import choose_held_out, opening_hash
from hdtool.builders.setup.replays import Overhead
from hdtool.builders.setup.stages import Stages
from hdtool.builders.setup.trained_drafters import method_options, usable_drafter_methods, with_model_drafters
from hdtool.builders.setup.verdict import Verdict
from hdtool.builders.setup.work_folder import RESULTS_FILE, WorkFolder
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.answered_questions import Answers
from hdtool.data.chat import encode_conversation
from hdtool.data.conversation import Conversation, Turn
from hdtool.data.errors import RecordError, ResultError
from hdtool.data.prompts import read_prompts
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import read_manifest
from hdtool.runtime.budget import measure_passes
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.settings.building import MAX_HELD_OUT, HeadsConfig
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.heads import random_for
from tests.support.locks import deleted_lock_files
from tests.support.processes import HDTOOL, read_until, start
from tests.support.project import ROOT
from tests.support.published_drafters import eagle3

LOGS = ROOT / "tests" / "support" / "demo_answers.jsonl"
COMMAND = ["setup", str(demo.MODEL), "--logs", str(LOGS), "--threads", "1", "--num-prompts", "1", "--quiet"]
ALL_STAGES = ("read", "model_store", "passes", "replay", "answers")
METHODS = ("_read", "_build_model_store", "_measure_passes", "_replay", "_answer")
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=0.7, seed=3)


def conversation(asked: str) -> Conversation:
    return Conversation((Turn("system", "Be brief."), Turn("user", asked), Turn("assistant", "Yes.")))


class TestSplit:
    @given(st.lists(st.integers(0, 40), min_size=2, max_size=60), st.floats(0.01, 0.9), st.randoms())
    def test_a_part_is_held_out_whatever_the_order(
        self, numbers: list[int], share: float, shuffler: random.Random
    ) -> None:
        openings = [opening_hash(conversation(f"Question {number}")) for number in numbers]
        if len(set(numbers)) == 1:
            with pytest.raises(RecordError, match="begin with the same question"):
                choose_held_out(openings, share)
            return
        chosen = choose_held_out(openings, share)
        assert chosen and chosen < set(openings)
        shuffler.shuffle(openings)
        assert choose_held_out(openings, share) == chosen

    def test_the_share_is_kept_and_bounded(self) -> None:
        openings = [opening_hash(conversation(f"Question {number}")) for number in range(5000)]
        assert len(choose_held_out(openings[:300], 0.1)) == 30
        assert len(choose_held_out(openings, 0.1)) == MAX_HELD_OUT

    def test_case_and_spaces_make_no_other_question(self) -> None:
        assert opening_hash(conversation("What is DNA?")) == opening_hash(conversation(" what  is dna?\n"))
        assert opening_hash(conversation("What is DNA?")) != opening_hash(conversation("What is RNA?"))

    def test_logs_without_answers_are_refused(self) -> None:
        with pytest.raises(RecordError, match="hdtool collect"):
            choose_held_out([], 0.1)


class TestWorkFolder:
    @pytest.fixture(autouse=True)
    def at_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HDTOOL_HOME", str(tmp_path))

    def test_results_last_and_depend_on_what_they_were_made_from(self) -> None:
        with WorkFolder("org/model", ["a"]).opened() as folder:
            folder.finish("read", {"conversations": 3})
        with WorkFolder("org/model", ["a"]).opened() as again:
            assert again.stages == {"read": {"conversations": 3}}
        with WorkFolder("org/model", ["b"]).opened() as other:
            assert not other.stages

    def test_one_process_at_a_time(self) -> None:
        with (
            WorkFolder("model", ["a"]).opened(),
            pytest.raises(ResultError, match="another setup of these logs is running"),
            WorkFolder("model", ["a"]).opened(),
        ):
            pass

    def test_a_file_of_someone_else_stays(self) -> None:
        folder = WorkFolder("model", ["a"])
        folder.path.mkdir(parents=True)
        (folder.path / RESULTS_FILE).write_text("my notes")
        with pytest.raises(ResultError, match="is not the results of a set-up"), folder.opened():
            pass
        assert (folder.path / RESULTS_FILE).read_text() == "my notes"


def test_a_prediction_adds_prompts_and_the_time_of_the_host() -> None:
    """Ten tokens in four steps after a prompt of 300 tokens; passes take 10 ms, and 1 ms for each draft token."""
    turn = ReplayedTurn(
        "", "", 0, 300, np.arange(10), np.zeros(10), np.array([1, 3, 3, 3]), np.array([0, 5, 5, 5]),
        np.full(4, 0.001), np.full(4, 0.002), np.zeros(20, int), np.zeros(20, int),
    )  # fmt: skip
    curve = CostCurve((0, 1), ((10.0, 11.0),))
    overhead = Overhead((100, 200), (0.5, 1.0), 0.004)
    predicted = overhead.predict(ReplayResult("hd", (turn,), {}), curve)
    prefill = 1.5  # 5 ms for each token after the longest measured prompt
    assert predicted.plain_tokens_per_second == pytest.approx(10 / (prefill + 9 * 0.010 + 10 * 0.004))
    assert predicted.tokens_per_second == pytest.approx(10 / (prefill + 3 * 0.015 + 4 * 0.007))


class TestVerdict:
    STAGES: ClassVar[dict[str, dict[str, Any]]] = {
        "read": {"conversations": 300, "held_out": 30},
        "model_store": {"folder": "stores/model", "tokens": 1000},
        "passes": {"device": "CPU", "dtype": "float32", "threads": 2},
        "replay": {
            "tokens_per_step": {"context": 1.5, "model": 2.0, "history": 2.1},
            "learning_curve": [{"answers": 500, "tokens_per_step": 1.9}, {"answers": 1000, "tokens_per_step": 2.0}],
            "accepted": {"model": 10},
            "draft_tokens_per_step": 6.0,
            "tokens_per_second": 44.0,
            "plain_tokens_per_second": 22.0,
        },
        "answers": {
            "tokens_per_second": {"generate": 15.0, "ar": 20.0, "hd": 39.0},
            "tokens_per_step": 1.9,
            "prompts": 4,
            "identical": 4,
            "near_ties": 0,
        },
    }

    def verdict(self, **changed: Any) -> Verdict:
        return Verdict(
            "my model", {**self.STAGES, "answers": {**self.STAGES["answers"], **changed}}, ("--threads", "2"), GREEDY
        )

    def replayed(self, **changed: Any) -> Verdict:
        return Verdict("my model", {**self.STAGES, "replay": {**self.STAGES["replay"], **changed}}, (), GREEDY)

    def test_answers_that_differ_at_near_ties_are_lossless_and_others_are_not(self) -> None:
        assert any(line.endswith("times as fast, with the same answers") for line in self.verdict().lines())
        near = self.verdict(identical=3, near_ties=1)
        assert near.lossless and near.pays
        assert any(line.endswith("with answers that differ at near ties only") for line in near.lines())
        assert "3 of 4 answers identical, 1 differs at near ties" in near.lines()[1]
        wrong = self.verdict(identical=3)
        assert not wrong.pays
        assert "NOT lossless: run hdtool verify 'my model' --threads 2 and report" in wrong.lines()[3]

    def test_more_answers_follow_from_the_learning_curve(self) -> None:
        """A doubling brought 2.0 / 1.9, so 5 % take log 1.05 / log (2.0 / 1.9) doublings: 0.951, or 934 answers."""
        (line, *_) = self.verdict().advice
        assert line.startswith("log or collect about 940 more answers for another 5% tokens per step, and run setup")
        assert line.endswith("the model store gives 1.90 tokens per step from 500 answers, 2.00 from 1,000")
        flat = [{"answers": 500, "tokens_per_step": 1.99}, {"answers": 1000, "tokens_per_step": 2.0}]
        assert self.replayed(learning_curve=flat).advice[0].startswith("more answers would bring little: ")
        assert self.replayed(learning_curve=[]).advice[0].startswith("log or collect 20 answers or more, ")
        slower = self.verdict(tokens_per_second={"generate": 15.0, "ar": 20.0, "hd": 20.0})
        assert slower.advice[0].startswith("log or collect about 940 more answers to make drafting pay, ")
        far = self.verdict(tokens_per_second={"generate": 15.0, "ar": 20.0, "hd": 14.0})
        assert far.advice[0].startswith("more answers would bring little: "), "50 % more take 2,500 answers and more"

    def test_sources_that_bring_nothing_are_named(self) -> None:
        steps = {"context": 1.5, "model": 2.0, "corpus": 2.001, "history": 2.0}
        verdict = self.replayed(tokens_per_step=steps)
        assert (
            "2.00 with the model store (+33%), 2.00 with the corpus index (+0%), 2.00 with the history"
            in verdict.lines()[2]
        )
        assert "-0%" not in verdict.lines()[2]
        assert any("the corpus brought nothing (2.00 tokens per step without it" in line for line in verdict.advice)
        assert not any("history" in line for line in verdict.advice)
        built = {"corpus_index": {"folder": "home/stores/0123456789abcdef/corpus", "tokens": 1}}
        named = Verdict("m", {**verdict.stages, **built}, (), GREEDY).advice
        assert any("hdtool stores remove corpus-01234567" in line for line in named)
        assert not any("corpus" in line for line in self.verdict().advice)
        assert any(line.startswith("the history brought 5% more") for line in self.verdict().advice)

    def test_lines_with_the_next_command(self) -> None:
        lines = self.verdict().lines()
        labels = ["expected", "measured", "sources", "verdict", "advice", "advice", "next"]
        assert [line.split()[0] for line in lines] == labels
        assert "44.0 tokens/s with hd, 22.0 without drafts: 2.00 times" in lines[0]
        assert "39.0 tokens/s with hd, 20.0 without drafts: 1.95 times" in lines[1]
        assert "1.50 tokens per step from the conversation alone, 2.00 with the model store" in lines[2]
        assert lines[-1].endswith("hdtool generate 'my model' --threads 2 \"...\"")

    def test_where_it_does_not_pay_the_verdict_gives_the_reason(self) -> None:
        verdict = self.verdict(tokens_per_second={"generate": 15.0, "ar": 20.0, "hd": 20.5})
        assert not verdict.pays
        assert "does not pay here: a step yields 1.90 tokens, and its 6.0 draft tokens" in verdict.lines()[3]
        assert "--method ar" in verdict.next_command

    def test_a_trained_drafter_that_is_faster_is_in_the_next_command(self) -> None:
        speeds = {"generate": 15.0, "ar": 20.0, "hd": 39.0, "hd+mtp": 50.0, "hd+drafter": 30.0}
        offered = {
            "hd+mtp": {"tokens_per_step": 3.5, "options": ["--method", "hd+mtp"]},
            "hd+drafter": {
                "tokens_per_step": 2.5,
                "options": ["--method", "hd+drafter", "--drafter", "my eagle"],
            },
        }
        found = self.verdict(tokens_per_second=speeds, offered=offered)
        lines = found.lines()
        assert lines[2] == "drafter   50.0 tokens/s with hd+mtp: 2.50 times, 3.50 tokens per step"
        assert "drafting pays: 2.50 times as fast with hd+mtp" in lines[5]
        assert found.next_command == "hdtool generate 'my model' --threads 2 --method hd+mtp \"...\""
        assert found.to_json()["method"] == "hd+mtp"
        slower = self.verdict(tokens_per_second=speeds | {"hd": 60.0}, offered=offered)
        assert slower.method == "hd" and "--method" not in slower.next_command
        other = self.verdict(tokens_per_second=speeds | {"hd+drafter": 70.0}, offered=offered)
        assert "--method hd+drafter --drafter 'my eagle'" in other.next_command

    def test_few_answers_that_contradict_the_prediction_are_called_few(self) -> None:
        slower = {"generate": 15.0, "ar": 20.0, "hd": 19.0}
        few = self.verdict(tokens_per_second=slower, prompts=2, identical=2).lines()[3]
        assert few.endswith("the prediction differs, and 2 answers are few: try --num-prompts 12")
        assert "--num-prompts" not in self.verdict(tokens_per_second=slower, prompts=12, identical=12).lines()[3]
        assert "--num-prompts" not in self.verdict(prompts=2, identical=2).lines()[3]

    def test_sampled_answers_are_called_so_and_may_contradict_the_prediction(self) -> None:
        slower = {"generate": 15.0, "ar": 20.0, "hd": 19.0}
        greedy = self.verdict(tokens_per_second=slower, prompts=2, identical=2)
        found = replace(greedy, sampling=SAMPLED, options=("--temperature", "0.7"))
        assert "temperature" not in "".join(greedy.lines())
        assert found.lines()[1].startswith(
            "measured  19.0 tokens/s with hd at temperature 0.7, 20.0 without drafts: 0.95"
        )
        assert "the prediction differs" in greedy.lines()[3] and "the prediction differs" not in found.lines()[3]
        assert found.next_command == "hdtool generate 'my model' --temperature 0.7 --method ar \"...\""
        sampling = {"temperature": 0.7, "top_k": None, "top_p": None, "repetition_penalty": None, "seed": 3}
        assert found.to_json()["sampling"] == sampling

    @pytest.mark.parametrize("stage", ["passes", "answers"])
    def test_on_a_busy_machine_no_ratio_is_printed(self, stage: str) -> None:
        busy = "No speed-up is stated, because the machine was busy. Measure again on an idle machine."
        stages = {**self.STAGES, stage: {**self.STAGES[stage], "doubt": busy}}
        verdict = Verdict("m", stages, (), GREEDY)
        expected, measured, _, judged, *_ = verdict.lines()
        assert expected.startswith("expected  44.0 tokens/s with hd, 22.0 without drafts, by replay of")
        assert measured.startswith("measured  39.0 tokens/s with hd, 20.0 without drafts; 15.0 by transformers'")
        assert judged == f"verdict   {busy[:-1]}, with the same command."
        assert "times" not in "".join(verdict.lines())
        assert verdict.next_command == 'hdtool generate m "..."'
        row = verdict.to_json()
        assert (row["pays"], row["doubt"], row["reason"]) == (None, busy, judged.removeprefix("verdict   "))
        wrong = Verdict("m", {**stages, "answers": {**stages["answers"], "identical": 1}}, (), GREEDY)
        assert wrong.pays is False and "NOT lossless" in wrong.lines()[3]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and measurements that take no time."""
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measure_passes, "REPETITIONS", 1)


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def stub_stages(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], interrupted: Sequence[str] = ()) -> list[str]:
    """Let stages measure nothing, and end those in ``interrupted`` once. The list grows by the stages that run."""
    ran: list[str] = []

    def stub(stage: str) -> Callable[[Stages], dict[str, Any]]:
        def run_stage(_: Stages) -> dict[str, Any]:
            ran.append(stage)
            if stage in interrupted and ran.count(stage) == 1:
                raise KeyboardInterrupt
            return TestVerdict.STAGES[stage]

        return run_stage

    for stage, method in zip(ALL_STAGES, METHODS, strict=True):
        if stage in names:
            monkeypatch.setattr(Stages, method, stub(stage))
    return ran


@pytest.mark.long
def test_drafters_of_a_checkpoint_and_in_its_folder_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own layers, heads that were trained on it, a published drafter; what does not fit is left out with a note."""
    folder = tmp_path / "model"
    shutil.copytree(demo.HYBRID, folder)
    loaded = load(str(folder))
    assert usable_drafter_methods(DecodeConfig(), loaded) == ["hd+mtp"]
    other = random_for(Target(model_of("llama")), HeadsConfig(rank=8))
    other.save(folder / "a heads of another model")
    random_for(loaded.target, HeadsConfig(rank=8)).save(folder / "b heads")
    eagle3(folder / "c eagle", loaded.target.model)
    eagle3(folder / "d eagle of another model", model_of("llama"))
    (folder / "e else").mkdir()
    (folder / "e else" / "config.json").write_text("[]", encoding="utf-8")
    decoding = with_model_drafters(DecodeConfig(), loaded, folder)
    assert decoding.heads == (str(folder / "b heads"),) and decoding.drafter == str(folder / "c eagle")
    assert method_options("hd+drafter", decoding) == ("--method", "hd+drafter", "--drafter", str(folder / "c eagle"))
    assert usable_drafter_methods(decoding, loaded) == ["hd+amphista", "hd+mtp", "hd+drafter"]
    assert capsys.readouterr().err == ""
    wrong = replace(decoding, drafter=str(folder / "d eagle of another model"))
    assert usable_drafter_methods(wrong, loaded) == ["hd+amphista", "hd+mtp"]
    assert "note: hd+drafter is left out: drafter" in capsys.readouterr().err


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.one_in(3)
def test_answers_are_sampled_as_asked(sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of ``generate``, which draws tokens differently, are not compared when sampling."""
    loaded, (prompt, *_) = load(ModelConfig(threads=1)), read_prompts(demo.PROMPTS)
    ids = encode_conversation(loaded.tokenizer, prompt.messages)
    expected = DraftingContender(loaded, NoDraft(), sampling, 24, NoDraft).answer(ids).output_ids
    answers: list[list[int]] = []
    verified: list[SamplingConfig] = []

    def differ(found: Sequence[Answers]) -> bool:
        answers.extend(one.output_ids[0] for one in found)
        return False

    def verifier(loaded: Loaded, sampling: SamplingConfig, *rest: Any) -> Verifier:
        verified.append(sampling)
        return Verifier(loaded, sampling, *rest)

    monkeypatch.setattr(held_out_answers, "identical", differ)
    monkeypatch.setattr(held_out_answers, "Verifier", verifier)
    found = answer_prompts(loaded, StoreSet(), ModelConfig(), sampling, [prompt], 1, 24, None)
    compared = found["tokens_per_second"].keys() - (() if sampling.is_greedy else {"generate"})
    assert answers == len(compared) * [expected]
    assert verified and set(verified) == {sampling} and found["near_ties"] == 1


@pytest.mark.usefixtures("quick")
class TestCommand:
    def test_from_logs_to_a_verdict(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sampled_with: list[SamplingConfig] = []

        def answered(
            loaded: Loaded, store_set: StoreSet, model: ModelConfig, sampling: SamplingConfig, *rest: Any
        ) -> Any:
            sampled_with.append(sampling)
            return answer_prompts(loaded, store_set, model, sampling, *rest)

        monkeypatch.setattr(stages, "answer_prompts", answered)
        assert run([*COMMAND, "--max-new-tokens", "16", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["conversations"], found["held_out"]) == (32, 4)
        assert found["measured"]["identical"] == found["measured"]["prompts"] == 1
        assert found["lossless"] and found["expected"]["speedup"] > 0
        assert list(found["tokens_per_step"]) == ["context", "model", "corpus", "history"]
        assert found["advice"] and "from 14 answers" in found["advice"][0] and "from 28" in found["advice"][0]
        assert not list((tmp_path / "home" / "setups").rglob("half")), "the store of half of the answers is temporary"
        assert Path(found["stores"]["model_store"]["folder"]).is_dir()
        assert run([*COMMAND, "--max-new-tokens", "16", "--json"]) == 0
        again = capsys.readouterr()
        assert json.loads(again.out) == found, "nothing is measured twice"
        assert again.err.count("done before") == len(ALL_STAGES)
        assert run([*COMMAND, "--max-new-tokens", "16", "--json", "--temperature", "0.7", "--seed", "3"]) == 0
        printed = capsys.readouterr()
        sampled = json.loads(printed.out)
        assert printed.err.count("done before") == len(ALL_STAGES) - 1, "only the answers depend on the temperature"
        assert sampled["lossless"] and sampled["sampling"] == {**found["sampling"], "temperature": 0.7, "seed": 3}
        assert " --threads 1 --temperature 0.7 --seed 3 " in sampled["next"]
        assert sampled_with == [GREEDY, SAMPLED]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--temperature", "-1"], "error: --temperature must be 0 (greedy) or more, got -1.0\n"),
            (["--temperature", "nan"], "error: --temperature must be 0 (greedy) or more, got nan\n"),
            (["--top-p", "0.9"], "error: --top-p has no effect with greedy decoding: set --temperature above 0"),
        ],
    )
    def test_impossible_sampling_is_refused_before_anything_is_written(
        self, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run([*COMMAND, *options]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(said) and printed.count("\n") == 1
        assert not (tmp_path / "home").exists()

    @pytest.mark.parametrize("stopped", ALL_STAGES)
    def test_it_goes_on_where_it_stopped(
        self, stopped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ctrl-C in a stage; the stages are stubs, so that only their order and their results count."""
        ran = stub_stages(monkeypatch, ALL_STAGES, [stopped])
        monkeypatch.setattr(WorkFolder, "forget", lambda *_: None)  # stubs write no files
        assert run(COMMAND) == 130
        place = ALL_STAGES.index(stopped)
        assert ran == list(ALL_STAGES[: place + 1])
        assert run(COMMAND) == 0
        assert ran[place + 1 :] == list(ALL_STAGES[place:])
        assert "drafting pays" in capsys.readouterr().out

    def test_another_store_is_replaced_only_on_request(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One that this set-up built, and did not record before it was killed, is its own."""
        finish = WorkFolder.finish

        def killed(self: WorkFolder, stage: str, result: dict[str, Any]) -> None:
            if stage == "model_store":
                raise KeyboardInterrupt
            finish(self, stage, result)

        monkeypatch.setattr(WorkFolder, "finish", killed)
        assert run(COMMAND) == 130
        monkeypatch.setattr(WorkFolder, "finish", finish)
        monkeypatch.setattr(Stages, "_measure_passes", interrupt)
        assert run(COMMAND) == 130, "the store is its own"
        capsys.readouterr()
        other = [*COMMAND, "--held-out-fraction", "0.3"]
        assert run(other) == 1
        assert "--replace replaces it" in capsys.readouterr().err
        assert run([*other, "--replace"]) == 130

    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The stages that measure, in the order in which they run; they measure nothing."""
        return stub_stages(monkeypatch, ALL_STAGES[2:])

    @pytest.mark.parametrize(("stage", "options"), [("answers", []), ("passes", ["--temperature", "0.7"])])
    def test_measurements_of_a_busy_machine_are_made_again(
        self,
        stage: str,
        options: list[str],
        measured: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Also passes, if only the answers depend on other options."""
        with monkeypatch.context() as busy:
            busy.setitem(TestVerdict.STAGES[stage], "doubt", "No speed-up is stated, because of others.")
            assert run(COMMAND) == 0
            assert "others, with the same command." in capsys.readouterr().out
        for _ in range(2):
            assert run([*COMMAND, *options]) == 0
            assert "drafting pays: 1.95 times" in capsys.readouterr().out
        assert measured == 2 * ["passes", "replay", "answers"], "times that are sound are kept"

    @pytest.mark.long
    def test_rankings_stay_when_answers_join_them_and_can_be_added(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def counts() -> dict[str, int]:
            capsys.readouterr()
            assert run(["stores", "--json"]) == 0
            (store,) = (one for one in json.loads(capsys.readouterr().out)["stores"] if one["kind"] == "model")
            return read_manifest(Path(store["folder"])).counts

        monkeypatch.setattr(Stages, "_measure_passes", interrupt)
        assert run(["build-model-db", "--model", str(demo.MODEL), "--rankings", "--quiet"]) == 0
        assert (counts()["rankings"], counts()["documents"]) == (4096, 0)
        assert run(COMMAND) == 130, "rankings alone need no --replace"
        assert counts()["rankings"] == 4096 and counts()["documents"]
        assert run([*COMMAND, "--replace"]) == 130
        assert counts()["rankings"] == 4096
        assert run(["build-model-db", "--model", str(demo.MODEL), "--from", str(LOGS), "--replace", "--quiet"]) == 0
        assert "rankings" not in counts()
        assert run([*COMMAND, "--rankings", "--replace"]) == 130
        assert counts()["rankings"] == 4096

    def test_a_store_that_was_removed_is_built_again(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(COMMAND) == 0
        (folder,) = (path.parent for path in (tmp_path / "home" / "stores").rglob(MANIFEST))
        shutil.rmtree(folder)
        measured.clear()
        assert run(COMMAND) == 0
        assert (folder / MANIFEST).exists()
        assert not measured, "the texts are the same, so the measurements hold"
        shown = capsys.readouterr().err
        assert shown.count("2/5 building the model store\n") == 2

    def test_other_weights_in_the_same_folder_are_measured_again(self, measured: list[str], tmp_path: Path) -> None:
        model = shutil.copytree(demo.MODEL, tmp_path / "model")
        command = ["setup", str(model), *COMMAND[2:]]
        assert run(command) == 0
        assert measured == list(ALL_STAGES[2:])
        (file,) = model.glob("*.safetensors")
        weights = {name: tensor + 1 for name, tensor in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})
        assert run(command) == 0
        assert measured == 2 * list(ALL_STAGES[2:])
        assert len(list((tmp_path / "home" / "stores").rglob(MANIFEST))) == 2, "each model has a store of its own"

    def test_other_measurements_need_no_other_stores(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Options of the model, of the answers and a corpus that is named later measure again what depends on them."""
        assert run(COMMAND) == 0
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        (corpus / "text.txt").write_text("A text of a corpus, which is short.\n" * 40)
        for options, expected in (
            (["--num-prompts", "2"], ["answers"]),
            (["--max-new-tokens", "8"], ["answers"]),
            (["--temperature", "0.7"], ["answers"]),
            (["--temperature", "0.7"], []),
            (["--temperature", "0.7", "--top-p", "0.9"], ["answers"]),
            (["--dtype", "bfloat16"], list(ALL_STAGES[2:])),
            (["--corpus", str(corpus)], list(ALL_STAGES[2:])),
            ([], list(ALL_STAGES[2:])),
        ):
            measured.clear()
            assert run([*COMMAND, *options]) == 0, capsys.readouterr().err
            assert measured == expected, options
            capsys.readouterr()
        assert run([*COMMAND, "--json"]) == 0
        assert "corpus_index" not in json.loads(capsys.readouterr().out)["stores"]

    def test_a_store_that_came_meanwhile_is_not_replaced(
        self, measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Another command builds one while this one reads its logs."""
        read = Stages._read

        def read_while_another_builds(self: Stages) -> dict[str, Any]:
            command = ["build-model-db", "--from", str(LOGS), "--model", str(demo.MODEL), "--quiet"]
            assert run(command) == 0
            return read(self)

        monkeypatch.setattr(Stages, "_read", read_while_another_builds)
        assert run(COMMAND) == 1
        assert "--replace replaces it" in capsys.readouterr().err
        assert not measured

    @pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
    def test_a_store_of_other_origin_is_refused_before_anything_is_written(
        self, dry_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Weights are not converted or downloaded for it, and a dry run says so."""
        assert run(["build-model-db", "--from", str(LOGS), "--model", str(demo.MODEL), "--quiet"]) == 0
        before = sorted((tmp_path / "home").rglob("*"))
        monkeypatch.setattr(stages, "place_of", lambda *_, **__: pytest.fail("the weights were fetched"))
        capsys.readouterr()
        assert run([*COMMAND, *dry_run]) == 1
        printed = capsys.readouterr()
        assert "holds a model store of" in printed.err and "--replace replaces it" in printed.err
        assert ("model     cannot replace the store in " in printed.out) == bool(dry_run)
        assert ("32 conversations in 1 file, 4 held out" in printed.out) == bool(dry_run)
        assert sorted((tmp_path / "home").rglob("*")) == before

    def test_a_dry_run_says_what_becomes_of_stores_and_stages(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def dry_run(*options: str) -> str:
            capsys.readouterr()
            assert run([*COMMAND, *options, "--dry-run"]) == 0
            return capsys.readouterr().out

        shown = dry_run()
        assert "32 conversations in 1 file, 4 held out" in shown and "5/5" in shown
        assert "model     goes to " in shown and "done before" not in shown
        assert not (tmp_path / "home").exists(), "a dry run changes nothing"
        assert run(COMMAND) == 0
        assert "model     was built before and stays in " in (shown := dry_run())
        assert shown.count("done before") == len(ALL_STAGES)
        assert dry_run("--max-new-tokens", "8").count("done before") == len(ALL_STAGES) - 1
        assert "model     replaces the store in " in dry_run("--held-out-fraction", "0.3", "--replace")

    def test_each_log_is_a_source_that_can_be_dropped(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = LOGS.read_text().splitlines(keepends=True)
        odd = os.fsdecode(b"caf\xe9.jsonl")  # not UTF-8
        logs = [tmp_path / "monday.jsonl", tmp_path / odd, tmp_path / "empty.jsonl"]
        for log, part in zip(logs, (lines[:20], lines[20:], ['{"messages": []}\n']), strict=True):
            log.write_text("".join(part))
        command = [*COMMAND[:2], *(f"--logs={log}" for log in logs), *COMMAND[4:], "--max-bad-fraction", "1"]
        assert run(command) == 0, capsys.readouterr().err
        (store,) = (path.parent for path in (tmp_path / "home" / "stores").rglob(MANIFEST))
        shares = read_manifest(store).sources
        assert [Path(share.name).name for share in shares] == ["monday.jsonl", "caf\\udce9.jsonl"]
        assert sum(share.records for share in shares) == 28
        capsys.readouterr()
        assert run(["drop", str(store), "--source", "monday.jsonl"]) == 0
        assert "removed " in (said := capsys.readouterr()).err and "monday.jsonl" in said.err
        assert [Path(share.name).name for share in read_manifest(store).sources] == ["caf\\udce9.jsonl"]
        assert run(command) == 1, "what was dropped does not come back unasked"
        assert "--replace replaces it" in capsys.readouterr().err

    def test_answers_belong_to_the_log_that_holds_them(self, measured: list[str], tmp_path: Path) -> None:
        """In two files of a batch, requests may be read before or after their answers."""
        rows = [json.loads(line)["messages"] for line in LOGS.read_text().splitlines()]
        asked: list[dict[str, Any]] = []
        answered: list[dict[str, Any]] = []
        for number, (question, answer) in enumerate(row[-2:] for row in rows):
            key = {"custom_id": str(number)}
            asked.append(key | {"url": "/v1/chat/completions", "body": {"messages": [question]}})
            answered.append(key | {"response": {"body": {"choices": [{"message": answer}]}}})
        for names in (("a-asked.jsonl", "b-answered.jsonl"), ("b-asked.jsonl", "a-answered.jsonl")):
            for name, batch in zip(names, (asked, answered), strict=True):
                (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in batch))
            logs = [f"--logs={tmp_path / name}" for name in sorted(names)]
            assert run([*COMMAND[:2], *logs, *COMMAND[4:], "--replace"]) == 0
            (store,) = (path.parent for path in (tmp_path / "home" / "stores").rglob(MANIFEST))
            assert [Path(share.name).name for share in read_manifest(store).sources] == [names[1]]

    def test_copies_of_logs_are_private_and_can_be_removed(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        setups = tmp_path / "home" / "setups"
        (old := setups / demo.MODEL.name / "0123456789abcdef").mkdir(parents=True)  # of a version that did not
        (old / "learned.jsonl").write_text('{"id": "1"}\n')
        (old / "setup.json").write_text('{"format": 1, "stages": {}}')
        umask = os.umask(0)
        try:
            assert run(COMMAND) == 0
        finally:
            os.umask(umask)
        (held_out,) = setups.rglob("held-out.jsonl")
        folder = held_out.parent
        assert {path.name for path in folder.iterdir()} == {"setup.json", "learned-0.jsonl", "held-out.jsonl", "lock"}
        copies = [path for path in folder.iterdir() if path.name != "lock"]
        assert {path.stat().st_mode & 0o777 for path in copies} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent, setups)} == {0o700}
        (folder / ".held-out.jsonl.0123456789abcdef.tmp").write_text("of a killed set-up")
        (folder / "notes.txt").write_text("mine")
        capsys.readouterr()
        assert run(["stores", "--json"]) == 0
        listed = [one for one in json.loads(capsys.readouterr().out)["stores"] if one["kind"] == "setup"]
        assert {one["folder"] for one in listed} == {str(folder), str(old)}
        assert run(["stores"]) == 0
        assert f"setup-{folder.name[:8]}" in (shown := capsys.readouterr().out) and LOGS.name in shown
        with deleted_lock_files() as deleted:
            assert run(["stores", "remove", f"setup-{folder.name[:8]}", "setup-01234567", "--yes"]) == 0
        assert deleted == [folder / "lock", old / "lock"]
        assert not old.exists()
        assert [path.name for path in folder.iterdir()] == ["notes.txt"], "what hdtool did not write stays"

    def test_a_running_setup_is_not_removed(
        self, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with WorkFolder("model", ["a"]).opened() as folder:
            assert run(["stores", "remove", f"setup-{folder.path.name[:8]}", "--yes"]) == 1
            assert "a setup is running in" in capsys.readouterr().err
            assert (folder.path / RESULTS_FILE).exists()

    def test_broken_logs_are_named_together_and_left_out_within_the_fraction(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        logs = tmp_path / "logs"
        logs.mkdir()
        shutil.copy(LOGS, logs / "good.jsonl")
        (logs / "empty.jsonl").touch()
        whole = gzip.compress(LOGS.read_bytes())
        (logs / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        command = [*COMMAND[:3], str(logs), *COMMAND[4:], "--dry-run"]
        assert run(command) == 1
        said = capsys.readouterr().err
        assert "error: 2 of 3 files cannot be read, " in said and "--max-bad-fraction" in said
        assert f"{logs / 'cut.jsonl.gz'} cannot be unpacked" in said and f"{logs / 'empty.jsonl'} is empty" in said
        assert run([*command, "--max-bad-fraction", "0.9"]) == 0
        printed = capsys.readouterr()
        assert " in 3 files" in printed.out and printed.err.count("left out: ") == 2


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(5,), pytest.param(range(1, 7), marks=pytest.mark.exhaustive)])
def test_a_kill_in_any_stage_loses_nothing(numbers: Iterable[int], tmp_path: Path) -> None:
    command = [*HDTOOL, *COMMAND, "--corpus", str(ROOT / "docs"), "--max-new-tokens", "16"]
    environment = os.environ | {"HDTOOL_HOME": str(tmp_path)}
    for stage in numbers:
        process = start(command, env=environment)
        read_until(process, f"{stage}/6")
        process.kill()
        process.communicate()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("next ")
    assert "1/6 reading the logs, done before" in ended.stderr


@pytest.mark.long
def test_two_setups_of_the_same_logs_do_not_mix(tmp_path: Path) -> None:
    environment = os.environ | {"HDTOOL_HOME": str(tmp_path)}
    first = start([*HDTOOL, *COMMAND], env=environment)
    read_until(first, "2/5")
    first.send_signal(signal.SIGSTOP)  # else it could end before the second one begins
    second = subprocess.run([*HDTOOL, *COMMAND], env=environment, capture_output=True, text=True, check=False)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1 and "another setup of these logs is running" in second.stderr
    first.communicate()
    assert first.returncode == 0
