"""Quantized weights: what is refused, what is left alone, and rows that must be independent."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Linear, Parameter

from hdtool.builders.evaluation.random_models import load_shape
from hdtool.builders.evaluation.verify import Difference, Oracle, Verifier
from hdtool.cli import app
from hdtool.data import demo
from hdtool.data.errors import FamilyError, HdtoolError, OptionError
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.kernels.linear_layers import CompiledLinear, compile_linear_layers
from hdtool.runtime.model import quantization as quantizing
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.quantization import RowByRow, quantized_layers
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load, load_stock
from hdtool.runtime.target.target import Target
from hdtool.runtime.target.tensor_parallel import ProcessGroup
from tests.support.decoding import answer_of, run
from tests.support.families import model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import prompt_of
from tests.support.quantized import Int8Layer, LlmInt8, OneScale, ScalePerRow, quantized
from tests.support.rehearsed import direct

PROMPT = prompt_of(20)
GREEDY = SamplingConfig()


def llama(kind: type[Int8Layer]) -> Any:
    return quantized(copy.deepcopy(model_of("llama")), kind)


@pytest.fixture
def outliers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's layers stand in for themselves; outliers are as common as in no real model."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(nn=SimpleNamespace(Linear8bitLt=LlmInt8)))
    monkeypatch.setattr(LlmInt8, "threshold", 1.0)


def checkpoint(folder: Path, told: dict[str, Any]) -> str:
    shutil.copytree(demo.MODEL, folder, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": told}))
    return str(folder)


@pytest.mark.parametrize(
    ("told", "lacking"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_a_missing_library(
    told: dict[str, Any],
    lacking: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quantizing, "find_spec", lambda name: None)
    folder = checkpoint(tmp_path, told)
    assert app.run(["generate", "--model", folder, "--prompt", "x"]) == 1
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert f'needs {lacking}, not installed here: pip install "bitsandbytes' in line
    with pytest.raises(HdtoolError, match=f"is quantized with .* needs {lacking},"):
        load_stock(ModelConfig(folder))


def test_a_library_that_transformers_requires(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"quant_method": "aqlm"})
    with pytest.raises(HdtoolError, match=r"cannot be loaded \(its weights\): .*pip install") as error:
        load(ModelConfig(folder))
    assert "whole" not in str(error.value), "the folder is not to blame"


def test_quantization_on_loading_is_refused_where_it_is_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="--quantization must be one of int8, nf4, q8_0, q4_0, got int9"):
        ModelConfig(quantization="int9")
    folder = checkpoint(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(OptionError, match="quantized already, with bitsandbytes: leave out --quantization int8"):
        load(ModelConfig(folder, quantization="int8"))
    with pytest.raises(OptionError, match="--quantization nf4 has no effect on a shape"):
        load_shape("llama-7b", ModelConfig(quantization="nf4"))
    monkeypatch.setattr(quantizing, "find_spec", lambda name: None)
    with pytest.raises(HdtoolError, match="--quantization nf4 needs bitsandbytes, not installed"):
        load(ModelConfig(quantization="nf4"))
    monkeypatch.setattr("hdtool.runtime.target.load.leader", lambda: ProcessGroup.__new__(ProcessGroup))
    with pytest.raises(OptionError, match="--quantization works in one process only"):
        load(ModelConfig(quantization="nf4"))


def test_weights_alone_are_quantized(capfd: pytest.CaptureFixture[str]) -> None:
    model = llama(Int8Layer)
    assert len(quantized_layers(model)) == 14
    assert not quantized_layers(model_of("llama"))
    plain = answer_of(Target(model), PROMPT, GREEDY)
    assert answer_of(Target(model), PROMPT, GREEDY, drafter=Hierarchy()) == plain
    fused = Target(model, direct)
    assert answer_of(fused, PROMPT, GREEDY, drafter=Hierarchy()) == plain and fused.is_fused
    assert capfd.readouterr().err == "", "nothing is rounded more than elsewhere"


def test_activations_that_share_a_scale_are_refused() -> None:
    with pytest.raises(FamilyError, match=r"layers\.0\..* scales its input over all tokens of a pass"):
        Target(llama(OneScale))


def test_rounding_is_noted_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hdtool.runtime.model.quantization.HIGH_PRECISION_TOLERANCE", 0.0)
    target = Target(llama(ScalePerRow))
    for drafter in (Hierarchy(), None):
        answer_of(target, PROMPT, GREEDY, drafter=drafter)
    assert capfd.readouterr().err.count("this model rounds its logits by") == 1


@pytest.mark.usefixtures("outliers_count")
def test_outliers_do_not_affect_other_rows() -> None:
    torch.manual_seed(0)
    layer: Any = LlmInt8(Linear(64, 48, bias=False))
    rows = torch.randn(2, 7, 64)
    alone = torch.stack([torch.stack([layer(row[None, None])[0, 0] for row in batch]) for batch in rows])
    shared = layer(rows)
    apart = RowByRow(torch.nn.ModuleList([layer]))
    torch.testing.assert_close(layer(rows), shared, rtol=0, atol=0)
    with apart.on():
        torch.testing.assert_close(layer(rows), alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(shared, alone, rtol=1e-3, atol=1e-3), "or there would be nothing to mend"
    apart.release()
    with apart.on():
        torch.testing.assert_close(layer(rows), shared, rtol=0, atol=0)


@pytest.mark.usefixtures("outliers_count")
def test_a_tree_is_checked_row_by_row(capfd: pytest.CaptureFixture[str]) -> None:
    """The same draft alone and among others: rounding aside, its logits are the same, in one slot or several."""
    model = llama(LlmInt8)
    target = Target(model, direct)
    assert not target.captures
    assert "not captured as CUDA graphs: its 8-bit layers look for outliers in each pass" in capfd.readouterr().err
    one = OneSequence(target)
    one.prefill(PROMPT)
    (few, many) = (DraftTree.of(5, list(range(9, 9 + nodes)), [-1] * nodes) for nodes in (0, 30))
    alone = one.verify(few)[0].clone()
    beside = one.verify(many)[0]
    slots = target.allocate(2)
    for slot in range(2):
        target.prefill(slots, slot, PROMPT)
    in_slot = target.verify(slots, [few, many])[0].logits[0]
    for found in (beside, in_slot):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    held = len(model.model.layers[0].mlp.down_proj._forward_pre_hooks)
    del target, one
    assert len(model.model.layers[0].mlp.down_proj._forward_pre_hooks) == held - 1, "the model is as it was"


def test_differences_are_explained_without_more_precise_weights() -> None:
    loaded = Loaded("small", Target(llama(ScalePerRow)), load(ModelConfig()).tokenizer)
    verifier = Verifier(loaded, GREEDY, NoDraft(), 4)
    steps = [token for step in run(loaded.target, PROMPT, GREEDY) for token in step.tokens]
    right, wrong = steps[3], (steps[3] + 1) % 100
    (found,) = verifier.explain([Difference("p", Oracle.PLAIN, PROMPT, steps[:3], right, wrong)])
    assert found.chosen == right
    assert not found.near_tie
    assert found.precise is not None
    assert found.precise.dtype == "float32, token by token"


def test_quantized_layers_multiply_as_their_library_does() -> None:
    class Packed(Parameter):
        """As libraries have them: a class that knows few operations."""

        def t(self) -> Any:
            raise NotImplementedError

    model: Any = torch.nn.ModuleList([Linear(64, 64, bias=False), Linear(64, 64, bias=False)])
    model[0].weight = Packed(model[0].weight.detach())
    compile_linear_layers(model)
    assert type(model[0].weight) is Packed
    assert [type(layer) for layer in model] == [Linear, CompiledLinear]


def test_the_fingerprint_tells_quantized_from_not() -> None:
    told = {fingerprint(model) for model in (model_of("llama"), llama(Int8Layer))}
    assert len(told) == 2
