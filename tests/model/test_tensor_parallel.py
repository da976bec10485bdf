"""A model over several processes or devices gives the output of a single one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

from hdtool.cli import app
from hdtool.data.errors import ModelError, OptionError
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.model import devices as placement
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target import tensor_parallel as ranks
from hdtool.runtime.target.target import Target
from hdtool.runtime.target.tensor_parallel import check_decoding, check_device, check_sharding
from tests.support.decoding import answer_of
from tests.support.families import model_of, random_model
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.oracle import prompt_of
from tests.support.rehearsed import direct

TOGETHER = """
import json, os, sys
from hdtool.cli.app import run
from hdtool.runtime.target.load import load_part
from hdtool.runtime.target import tensor_parallel as ranks
from hdtool.runtime.target.tensor_parallel import follow, leading

ranks.MESSAGE_SIZE = 256
if os.environ["RANK"] != "0":
    sys.exit(follow(load_part))
with leading():
    sys.exit(max(run(arguments) for arguments in json.loads(sys.argv[1])))
"""
"""What the command does when torchrun starts it, for several commands: starting is what takes the time.

Messages are so short that prompts and trees need two broadcasts."""

ASKED = ["generate", "--prompt", "Tom has 3 boxes with 12 pencils each. How many pencils?", "--json"]
ASKED += ["--threads", "1", "--draft-tokens", "16"]
COMMANDS = [
    [*ASKED, "--max-new-tokens", "24"],
    [*ASKED, "--max-new-tokens", "24", "--temperature", "0.8", "--seed", "5", "--method", "hd+logitspec"],
]


@pytest.mark.long
def test_two_processes_give_the_answer_of_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    of_file = [*ASKED, "--max-new-tokens", "8", "--model", str(write_gguf(tmp_path / "a.gguf", tiny_llama(), "Q8_0"))]
    commands = [*COMMANDS, of_file]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", str(script), json.dumps(commands)],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for arguments in commands:
        assert app.run(arguments) == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    alone = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(answers) == len(alone) == len(commands), "only one of them prints"
    for arguments, found, expected in zip(commands, answers, alone, strict=True):
        assert found["output_ids"] == expected["output_ids"]
        assert found["steps"] < found["tokens"] or arguments is of_file, "drafts were accepted"
    assert done.stderr.count("drafting from") == len(commands)


def test_offloaded_weights() -> None:
    """Offloaded weights, as a device map makes them; weights on several devices take the same path."""
    model, prompt = model_of("llama"), prompt_of(20)
    plain = answer_of(Target(model), prompt, SamplingConfig())
    elsewhere = random_model("Llama")
    elsewhere.load_state_dict(model.state_dict())
    elsewhere.generation_config.eos_token_id = None
    accelerate.cpu_offload(elsewhere, torch.device("cpu"))
    assert placement.not_on_one_device_reason(elsewhere)
    assert answer_of(Target(elsewhere), prompt, SamplingConfig(), drafter=Hierarchy()) == plain


def test_a_model_in_two_places_is_not_captured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One layer on the CPU, one on disk: what a device map makes of a model that is too large, here in small."""
    model: Any = model_of("llama")
    prompt = prompt_of(20)
    plain = answer_of(Target(model, direct), prompt, SamplingConfig())
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    spread = type(model).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    spread.generation_config.eos_token_id = None
    assert len(set(spread.hf_device_map.values())) == 2
    capfd.readouterr()
    target = Target(spread, direct)
    assert not target.captures
    for drafter in (NoDraft(), Hierarchy()):
        assert answer_of(target, prompt, SamplingConfig(), drafter=drafter) == plain
    note = "note: the steps of this model are not captured as CUDA graphs: some of its weights are loaded only when"
    assert capfd.readouterr().err.count(note) == 1


def test_a_device_map_gives_the_answer_of_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--device-map", "auto"]):
        assert app.run([*ASKED, "--max-new-tokens", "8", *more]) == 0
    one, spread = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert one["output_ids"] == spread["output_ids"]


def refusal(model_type: str, heads: int, plan: object) -> str:
    config = SimpleNamespace(model_type=model_type, num_key_value_heads=heads, base_model_tp_plan=plan)
    config.get_text_config = lambda decoder: config
    with pytest.raises(ModelError) as error:
        check_sharding(config, "some/model", 2)
    return str(error.value)


def test_a_model_that_cannot_be_split_is_refused() -> None:
    assert "no tensor-parallel plan for models of type 'gpt2'" in refusal("gpt2", 4, None)
    assert "it has 3 heads of keys and values" in refusal("llama", 3, {"layers.*.self_attn.q_proj": "colwise"})


@pytest.mark.parametrize(
    ("attempt", "said_so"),
    [
        (lambda: ModelConfig(device_map="everywhere"), "--device-map must be one of .* got everywhere"),
        (lambda: ModelConfig(device="cpu", device_map="auto"), "--device must be left out with --device-map"),
        (lambda: check_device("mps"), "device is mps, but processes that torchrun starts compute on"),
    ],
)
def test_options_that_do_not_go_together(attempt: object, said_so: str) -> None:
    with pytest.raises(OptionError, match=said_so):
        attempt()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("asked", "said_so"),
    [
        (DecodeConfig(batch_size=2), "batch-size is 2"),
        (DecodeConfig("hd+amphista"), "drafts by a trained drafter"),
        (DecodeConfig(history="folder"), "history is folder"),
    ],
)
def test_methods_that_need_the_whole_model_are_refused(
    asked: DecodeConfig, said_so: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_decoding(asked)
    monkeypatch.setattr(ranks, "_group", object())
    with pytest.raises(OptionError, match=said_so):
        check_decoding(asked)


@pytest.mark.parametrize(("rank", "code", "lines"), [("0", 2, 1), ("1", 0, 0)])
def test_other_commands_run_alone(
    rank: str, code: int, lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert app._run_together(["bench", "--limit", "1"]) == code
    told = capfd.readouterr().err.splitlines()
    assert len(told) == lines and all("torchrun works with hdtool generate only, got bench" in line for line in told)
