"""Estimated passes: the bytes that they read, experts by how many rows wake, and the limits of a device."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from hdtool.builders.evaluation.estimated_passes import PassReads, Roofline, distinct_experts
from hdtool.builders.evaluation.random_models import weight_bytes_read
from hdtool.cli.app import run
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.target.target import Target
from tests.support.families import WINDOW, model_of

EXPERTS, TOP = 4, 2
"""Those of the tiny mixtures."""


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_independent_rows_wake_the_mean_over_all_their_choices(rows: int) -> None:
    choices = list(product(combinations(range(5), 2), repeat=rows))
    mean = sum(len(set().union(*chosen)) for chosen in choices) / len(choices)
    assert distinct_experts(rows, 2, 5) == pytest.approx(mean)


def test_rows_that_agree_wake_fewer() -> None:
    assert distinct_experts(1, 2, 8, 0.5) == 2
    assert distinct_experts(9, 2, 8, 1.0) == 2
    assert distinct_experts(2, 2, 8) == pytest.approx(3.5)
    assert distinct_experts(2, 2, 8, 0.4) == pytest.approx(2.9)


def expert_bytes(model: Any) -> int:
    return sum(int(weight.nbytes) for name, weight in model.named_parameters() if ".experts." in name)


def all_but_embeddings(model: Any) -> int:
    return sum(int(weight.nbytes) for weight in model.parameters()) - int(model.get_input_embeddings().weight.nbytes)


def test_every_row_of_a_dense_model_reads_the_same_weights() -> None:
    model = model_of("llama")
    reads = PassReads.of(model)
    assert reads.weights(1) == reads.weights(64) == all_but_embeddings(model)
    assert weight_bytes_read(Target(model)) == all_but_embeddings(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_mixture_reads_the_experts_that_its_rows_wake(family: str) -> None:
    model = model_of(family)
    reads, experts, whole = PassReads.of(model), expert_bytes(model), all_but_embeddings(model)
    assert 0 < experts < whole
    for rows, overlap in ((1, 0.0), (2, 0.0), (5, 0.3), (400, 0.0)):
        share = distinct_experts(rows, TOP, EXPERTS, overlap) / EXPERTS
        assert reads.weights(rows, overlap) == pytest.approx(whole - experts + share * experts)
    assert weight_bytes_read(Target(model)) == pytest.approx(whole - experts / 2, abs=1)


def test_a_model_without_memory_reads_as_much() -> None:
    real, config = PassReads.of(model_of("mixtral")), model_of("mixtral").config
    with torch.device("meta"):
        assert PassReads.of(type(model_of("mixtral"))(config)) == real


def test_windows_bound_what_is_read_of_a_context() -> None:
    model = model_of("gpt_oss")
    reads, one = PassReads.of(model), PassReads.of(model).kv_caches[0].nbytes
    windows = [kv_cache.window for kv_cache in reads.kv_caches]
    assert sorted(set(windows), key=str) == [WINDOW, None]
    narrow, wide = windows.count(WINDOW), windows.count(None)
    assert reads.context(2, 1000) == one * (narrow * WINDOW + wide * 1002)
    shapes = [part for layer in Target(model).facts.shapes for part in layer.kept]
    assert one * len(windows) == sum(part.heads * part.width * part.dtype.itemsize for part in shapes)


def test_a_pass_takes_as_long_as_reading_or_as_computing() -> None:
    reads = PassReads.of(model_of("mixtral"))
    memory = reads.weights(8, 0.25) + reads.context(8, 99)
    assert Roofline(1e9).seconds(reads, 8, 99, 0.25) == pytest.approx(memory / 1e9)
    slow = Roofline(1e9, operations=1e6).seconds(reads, 8, 99, 0.25)
    assert slow == pytest.approx(2 * 8 * reads.weights(1) / 4 / 1e6)
    assert Roofline(1e9, operations=1e15).seconds(reads, 8, 99) == Roofline(1e9).seconds(reads, 8, 99)
    curve = Roofline(1e9).curve(reads, (10, 100), 0.25)
    assert curve.seconds(7, 100) == pytest.approx(memory / 1e9)
    assert curve.seconds(7, 10) < curve.seconds(7, 100)


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 300}
    MixtralConfig(**sizes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_the_command_estimates_passes_of_a_shape(
    home: Path, shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["bench-cost", "--shape", str(shape), "--bandwidth", "2", "--out", str(tmp_path / "out")]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    curve = CostCurve.read(tmp_path / "out" / "cost.json")
    assert (told["contexts"], told["device"]) == ([64, 128, 256], "a device of 2 GB/s (estimate)")
    assert curve.dtype == "bfloat16" and curve.seconds(7, 64) > 1.5 * curve.seconds(0, 64)
    assert run([*asked, "--overlap", "1"]) == 0
    same = CostCurve.read(tmp_path / "out" / "cost.json")
    assert same.seconds(0, 64) == curve.seconds(0, 64) and same.seconds(7, 64) < 1.1 * same.seconds(0, 64)
    assert run([*asked, "--dtype", "float32"]) == 0
    assert CostCurve.read(tmp_path / "out" / "cost.json").seconds(0, 64) == pytest.approx(2 * curve.seconds(0, 64))
    assert not home.exists(), "no budget takes an estimate for a measurement"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bandwidth", "2"], "--bandwidth estimates the passes of a shape: name one by --shape"),
        (["--shape", "tiny", "--bandwidth", "0"], "--bandwidth must be above 0, got 0"),
        (["--shape", "tiny", "--bandwidth", "2", "--teraflops", "-1"], "--teraflops must be above 0, got -1"),
        (["--shape", "tiny", "--bandwidth", "2", "--overlap", "30"], "--overlap must be from 0 to 1, got 30"),
        (["--shape", "tiny", "--overlap", "0.3"], "--overlap must be left out without --bandwidth"),
        (["--shape", "tiny", "--bandwidth", "2", "--contexts", "2048"], "the context of tiny ends at 2,048 tokens"),
        (["--shape", "tiny", "--bandwidth", "2", "--quantization", "int8"], "--quantization int8 has no effect"),
    ],
)
def test_mistakes_give_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["bench-cost", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
