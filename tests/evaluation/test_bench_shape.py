"""``hdtool bench-shape``: real steps of a model with random weights, recorded acceptance."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from hdtool.builders.evaluation.experiment import Figures
from hdtool.builders.evaluation.random_models import load_shape, weight_bytes_read
from hdtool.builders.evaluation.recorded_bench import (
    Reproducing,
    drafting_contender,
    fitting_turns,
    recorded_benchmark,
)
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, replay_method
from hdtool.cli.app import run
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.measuring import SHAPES
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.rehearsed import direct
from tests.support.spec_bench_answers import turn_of

LINES = ["def first(items):\n    return items[0]\n", "def last(items):\n    return items[-1]\n"]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Question {n}"}, {"role": "assistant", "content": LINES[n % 2] * 3}]}
        for n in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def timed(capfd: pytest.CaptureFixture[str], traces: Path, *options: str) -> Any:
    asked = ["bench-shape", "tiny", "--traces", str(traces), "--quiet", "--device", "cpu", "--json"]
    assert run([*asked, *options]) == 0
    return json.loads(capfd.readouterr().out)


def test_everybody_says_as_much_and_drafting_takes_fewer_steps(traces: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = timed(capfd, traces)
    figures = found["methods"]
    assert list(figures) == ["generate", "generate-static", "ar", "hd"]
    assert len({one["tokens"] for one in figures.values()}) == 1
    assert figures["ar"]["tokens_per_step"] == 1.0
    assert all(one["tokens_per_second"] > 0 for one in figures.values())
    assert (found["model"], found["dtype"], found["answers"]) == ("tiny, random weights", "float32", 4)
    assert figures["ar"]["share_of_bandwidth_limit"] > 0
    assert not found["captured"]
    wide = timed(capfd, traces, "--methods", "hd", "--draft-tokens", "16", "--limit", "2", "--max-new-tokens", "20")
    assert wide["answers"] == 2
    assert wide["methods"]["hd"]["tokens"] == 40
    assert wide["methods"]["hd"]["tokens_per_step"] > 1.2


def test_the_table_says_what_it_is(traces: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["bench-shape", "tiny", "--traces", str(traces), "--quiet", "--methods", "ar,hd", "--limit", "1"]
    assert run(asked) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("tiny, random weights: 0.00 billion parameters in float32, steps called one by one\n")
    assert f"1 answers as recorded in {traces}: real steps, recorded acceptance" in printed
    *_, columns, plain, _ = (line.split() for line in printed.splitlines())
    assert columns[-2:] == ["vs", "plain"] and (plain[0], plain[-1]) == ("ar", "1.00")


@pytest.mark.parametrize("budget", [4, 24])
def test_as_much_is_accepted_as_in_a_replay(budget: int) -> None:
    words = [(7 * place) % 11 + 3 for place in range(60)]
    turns = [RecordedTurn("c", "", 0, words[:12], words[12:], None), RecordedTurn("d", "", 0, words[:5], words, None)]
    config = DecodeConfig("hd", draft_tokens=budget)
    target = Target(model_of("llama"), direct)
    played = replay_method(ReplayMethod("hd", config), turns, StoreSet())
    tell = drafting_contender(target, drafter_for(config, target, StoreSet()))
    for turn, there in zip(turns, played.turns, strict=True):
        found = Figures.of(tell(turn))
        assert found.stats.steps == len(there.accept_lengths) < len(turn.answer)
        assert found.stats.tokens == found.tokens == len(turn.answer)
        assert found.later.steps == found.stats.steps - 1


def test_the_warm_up_is_no_history() -> None:
    """The first answer is made twice, and nothing of it repeats."""
    target, answer = Target(model_of("llama"), direct), list(range(3, 43))
    turns = [RecordedTurn(name, "", 0, [50, 51, ord(name) - 40], answer) for name in "ab"]
    config = DecodeConfig("hd", draft_tokens=8)

    def drafting() -> Reproducing:
        return drafting_contender(target, drafter_for(config, target, StoreSet()))

    steps = [totals["hd"].stats.steps for totals in recorded_benchmark({"hd": drafting}, turns)]
    assert steps[0] == len(answer) and steps[1] - steps[0] < 12


@pytest.mark.parametrize("works", [0, 2])
def test_a_contender_that_fails_is_left_out(works: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In the warm-up, or in the second turn that is measured."""
    target = Target(model_of("llama"))
    ran = []

    def failing(turn: RecordedTurn) -> list[AnsweredTurn]:
        ran.append(turn)
        if len(ran) > works:
            raise RuntimeError("no compiler was found\nand a long story")
        return [turn_of([1] * len(turn.answer), 1.0)]

    def plain() -> Reproducing:
        return drafting_contender(target, drafter_for(DecodeConfig(method="ar"), target, StoreSet()))

    turns = [RecordedTurn("", "", 0, [1, 2, 3], [4] * 5) for _ in range(3)]
    *_, last = found = list(recorded_benchmark({"generate-static": lambda: failing, "ar": plain}, turns))
    assert len(found) == 3 and last.keys() == {"ar"} and last["ar"].tokens == 15
    assert "note: generate-static is left out, because it failed (no compiler was found)" in capsys.readouterr().err
    assert len(ran) == works + 1


def test_answers_that_do_not_fit_are_left_out_and_long_ones_are_cut_off() -> None:
    target = Target(model_of("llama"))
    turns = [RecordedTurn("a", "", 0, [1] * 500, [2] * 30), RecordedTurn("b", "", 0, [1] * 9, [2] * 30)]
    assert [(turn.conversation, len(turn.answer)) for turn in fitting_turns(turns, target, 20)] == [("b", 20)]
    assert [turn.conversation for turn in fitting_turns(turns, target, 12)] == ["a", "b"]


def test_a_configuration_on_disk_is_a_shape(traces: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model_of("qwen2").config.save_pretrained(tmp_path)
    path = str(tmp_path / "config.json")
    asked = ["bench-shape", path, "--traces", str(traces), "--quiet", "--methods", "ar", "--json"]
    assert run([*asked, "--max-new-tokens", "8", "--limit", "1"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["methods"]["ar"]["tokens"] == 8
    tokenizer = load_tokenizer(ModelConfig())
    loaded = load_shape(path, ModelConfig())
    assert loaded.target.config.vocab_size >= len(tokenizer), "what is on record must have embeddings"


def test_the_same_shape_has_the_same_weights_and_the_type_asked_for() -> None:
    first, again = (load_shape("tiny", ModelConfig(device="cpu")).target for _ in range(2))
    assert torch.equal(next(first.model.parameters()), next(again.model.parameters()))
    half = load_shape("tiny", ModelConfig(device="cpu", dtype="bfloat16")).target
    assert half.dtype == torch.bfloat16
    assert weight_bytes_read(half) * 2 == weight_bytes_read(first)
    table = first.model.get_input_embeddings().weight
    assert weight_bytes_read(first) == sum(weight.nbytes for weight in first.model.parameters()) - table.nbytes


def test_known_shapes_are_as_large_as_their_names_say() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    for name, billions in (("llama-7b", 6.74), ("llama-3-8b", 8.03)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[name]))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (["tiny"], "Missing option '--traces'", 2),
        (["huge", "--traces", "TRACES"], "shape is 'huge': it must be one of tiny, llama-7b, llama-3-8b", 2),
        (["tiny", "--traces", "TRACES", "--methods", "lade"], "--methods must be methods that", 2),
        (["tiny", "--traces", "TRACES", "--methods", "x"], "--methods must be names from", 2),
        (["tiny", "--traces", "TRACES", "--baseline", "ar"], "No such option", 2),
        (["TRACES", "--traces", "TRACES"], "is no configuration of a model", 1),
    ],
)
def test_mistakes_are_told_in_a_line(
    options: list[str], said: str, code: int, traces: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = [str(traces) if option == "TRACES" else option for option in options]
    assert run(["bench-shape", "--quiet", *named]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert said in line


def test_a_context_that_is_too_short_for_all_is_told(
    traces: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = deepcopy(model_of("llama").config)
    config.max_position_embeddings = 12
    config.save_pretrained(tmp_path)
    assert run(["bench-shape", "--quiet", str(tmp_path / "config.json"), "--traces", str(traces)]) == 1
    assert "no answer in" in capfd.readouterr().err
