"""Models whose weights stay in 16 bits on a CPU: every logit has the bits of float32, and so answers are equal."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Embedding, Linear, Module, ModuleList
from transformers import PreTrainedModel

from hdtool.runtime.budget.measure_passes import _saved_file
from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.linear_layers import CompiledLinear, compile_linear_layers, compiled_linear, share_weights
from hdtool.runtime.kernels.mixture_of_experts import arrange_experts
from hdtool.runtime.model import compact_layers
from hdtool.runtime.model.compact_layers import (
    compact_parameters,
    compact_weights,
    expand_weights_read,
    has_compact_weights,
)
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.reference_logits import logits_after, more_precise
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load, load_settings
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.stored_model import stored_model
from tests.support import families
from tests.support.decoding import SAMPLINGS, answer_of, assert_lossless
from tests.support.families import FAMILIES
from tests.support.oracle import all_logits, generated, prompt_of

DTYPES = [torch.bfloat16, torch.float16]
LENGTHS = (1, 3, 16, 64, 65, 100)
"""Numbers of rows that the compiled matmul takes in different ways."""


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families with layers that the compiled matmul takes, and with values that leave no two tokens tied."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.3}
    if "deepseek_v3" in request.node.name:
        del shape["head_dim"]
    for name, size in shape.items():
        monkeypatch.setitem(families.SHAPE, name, size)


def model_in(dtype: torch.dtype, family: str = "llama") -> PreTrainedModel:
    """A model in float32 with numbers that this dtype holds."""
    torch.manual_seed(1)
    model: Any = FAMILIES[family]()
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    return model  # type: ignore[no-any-return]


def both(dtype: torch.dtype, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with weights in float32 and with weights in 16 bits."""
    wide = model_in(dtype, family)
    compact = copy.deepcopy(wide)
    compact_weights(compact)
    for model in (wide, compact):
        arrange_experts(model)
        compile_linear_layers(model)
    return wide, compact


def names_of(model: Module) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if is_compact(weight)}


def read_as_usual(layer: Linear, input: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(input, layer.weight, layer.bias)


def checkpoint(folder: Path, dtype: torch.dtype, **changes: Any) -> Path:
    torch.manual_seed(2)
    return families.saved(families.random_model("Llama", **changes).to(dtype), folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_logits_have_the_bits_of_float32(family: str, dtype: torch.dtype) -> None:
    wide, compact = both(dtype, family)
    assert has_compact_weights(compact) and not has_compact_weights(wide)
    assert compact.dtype == torch.float32
    for length in LENGTHS:
        assert torch.equal(all_logits(compact, length), all_logits(wide, length)), length


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_do_not_change_the_answer(family: str) -> None:
    wide, compact = both(torch.bfloat16, family)
    prompt = prompt_of(20)
    target = Target(compact)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]):
        assert_lossless(target, prompt, sampling, expected=answer_of(Target(wide), prompt, sampling))
    assert has_compact_weights(compact)
    assert generated(compact, prompt, 48) == generated(wide, prompt, 48)


@pytest.mark.parametrize("dtype", DTYPES)
def test_automatic_mixed_precision_gives_the_same_bits(dtype: torch.dtype) -> None:
    """As in the training of heads, which reads the target in bfloat16."""
    wide, compact = both(dtype)
    for length in (3, 80):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = all_logits(compact, length), all_logits(wide, length)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_tied_layers_share_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.SHAPE, "tie_word_embeddings", True)
    _, compact = both(torch.bfloat16)
    table: Any = compact.get_input_embeddings()
    head: Any = compact.get_output_embeddings()
    assert isinstance(table, Embedding) and isinstance(head, CompiledLinear)
    assert table.weight is head.weight and is_compact(table.weight)
    with torch.inference_mode():
        table(torch.tensor([1])), head(torch.ones(1, 64))
    assert table.weight.expansions.count == 0


def test_weights_that_16_bits_do_not_hold_stay_in_float32() -> None:
    model = model_in(torch.bfloat16)
    changed: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    changed.weight.data[5, 7] = 1 / 3
    before = copy.deepcopy(model)
    names = {name for name, weight in model.named_parameters() if weight.dim() == 2}
    compact_weights(model)
    assert names_of(model) == names - {"model.layers.0.mlp.up_proj.weight"}
    assert torch.equal(all_logits(model, 9), all_logits(before, 9))


class Odd(Linear):
    """A layer with code of its own."""


def test_which_layers_stay_in_float32() -> None:
    other, long, bounded, fit = Odd(64, 4), Linear(65, 4), Embedding(4, 64, max_norm=1.0), Linear(64, 4)
    shared = Linear(64, 4)
    model = ModuleList([other, long, bounded, fit, shared])
    model.extra = shared.weight
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    compact_weights(model)
    assert names_of(model) == {"3.weight"}


def test_where_the_matmul_differs_weights_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_layers, "_has_same_bits", lambda narrow: False)
    model = model_in(torch.bfloat16)
    compact_weights(model)
    assert names_of(model) == {"model.embed_tokens.weight"}


def test_the_matmul_is_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = torch.randn(20, 64).bfloat16()
    assert compact_layers._has_same_bits(narrow)

    def other(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = compiled_linear(input, weight)
        return torch.nextafter(found, found + 1) if weight.dtype == torch.bfloat16 and len(input) == 7 else found

    monkeypatch.setattr(compact_layers, "compiled_linear", other)
    assert not compact_layers._has_same_bits(narrow)


def test_a_weight_that_other_code_reads_is_right_and_then_kept_in_float32() -> None:
    wide, compact = both(torch.bfloat16)
    for model in (wide, compact):
        layer: Any = model.get_submodule("model.layers.1.mlp.up_proj")
        layer.forward = partial(read_as_usual, layer)
    assert torch.equal(all_logits(compact, 9), all_logits(wide, 9))
    before = names_of(compact)
    expand_weights_read(compact)
    assert before - names_of(compact) == {"model.layers.1.mlp.up_proj.weight"}
    assert torch.equal(all_logits(compact, 9), all_logits(wide, 9))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_checkpoint_has_the_bits_of_one_in_float32(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    folder = checkpoint(tmp_path / "model", dtype, tie_word_embeddings=tied)
    compact, wide = (load(ModelConfig(str(folder), device="cpu", dtype=kind)).target for kind in ("auto", "float32"))
    matrices = {name for name, weight in wide.model.named_parameters(remove_duplicate=False) if weight.dim() == 2}
    assert names_of(compact.model) == matrices and not names_of(wide.model)
    assert {weight.stored.dtype for weight, _ in compact_parameters(compact.model)} == {dtype}
    assert compact.dtype == wide.dtype == torch.float32
    assert {tensor.dtype for tensor in compact.model.parameters()} == {torch.float32}
    for length in LENGTHS:
        assert torch.equal(all_logits(compact.model, length), all_logits(wide.model, length))
    assert fingerprint(compact.model) == fingerprint(wide.model)
    assert _saved_file(compact) != _saved_file(wide)
    prompt = prompt_of(12)
    assert_lossless(compact, prompt, expected=answer_of(wide, prompt))


def test_a_checkpoint_in_16_bits_is_never_expanded(tmp_path: Path) -> None:
    config = ModelConfig(str(checkpoint(tmp_path / "model", torch.bfloat16, attention_bias=True)), device="cpu")
    model = stored_model(config, load_settings(config), None, check=False)
    assert {weight.dtype for weight in model.parameters() if weight.dim() == 2} == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters() if weight.dim() == 1} == {torch.float32}


def test_a_checkpoint_of_several_dtypes_is_not_rounded(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    exact = {"model.norm.weight": torch.float32, "model.layers.0.mlp.up_proj.weight": torch.float32}
    for name, dtype in exact.items():
        tensors[name] = tensors[name].to(dtype) + 1e-5
    for number, dtype in enumerate((torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)):
        name = f"model.layers.{number % 2}.mlp.{'gate' if number < 2 else 'down'}_proj.weight"
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, file, {"format": "pt"})
    compact, wide = (load(ModelConfig(str(folder), device="cpu", dtype=kind)).target for kind in ("auto", "float32"))
    assert "model.layers.0.mlp.up_proj.weight" not in names_of(compact.model)
    assert "model.layers.1.mlp.up_proj.weight" in names_of(compact.model)
    assert torch.equal(all_logits(compact.model, 9), all_logits(wide.model, 9))


def test_a_higher_precision_and_back() -> None:
    wide, compact = both(torch.bfloat16)
    weights = {name: id(weight) for name, weight in compact.named_parameters()}
    prompt = prompt_of(9)
    expected = []
    for model in (wide, compact):
        with more_precise(model, torch.device("cpu")):
            assert model.dtype == torch.float64
            expected.append(logits_after(model, prompt))
    assert expected[0].dtype == torch.float64 and torch.equal(*expected)
    assert {name: id(weight) for name, weight in compact.named_parameters()} == weights
    assert torch.equal(all_logits(compact, 9), all_logits(wide, 9))


def test_a_stock_model_keeps_its_own_weights() -> None:
    stock = model_in(torch.bfloat16)
    _, compact = both(torch.bfloat16)
    before = {name: weight.data_ptr() for name, weight in stock.named_parameters()}
    share_weights(stock, compact)
    assert {name: weight.data_ptr() for name, weight in stock.named_parameters()} == before
    assert not has_compact_weights(stock)


def test_a_model_can_be_converted_to_another_dtype() -> None:
    wide, compact = both(torch.bfloat16)
    for model in (wide, compact):
        model.to(torch.float64)  # type: ignore[arg-type]
    assert not has_compact_weights(compact)
    assert torch.equal(all_logits(compact, 9), all_logits(wide, 9))


def test_new_numbers_of_a_weight_count() -> None:
    """As when an adapter is merged."""
    wide, compact = both(torch.bfloat16)
    for model in (wide, compact):
        layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
        layer.weight.data = layer.weight.data + 1 / 3
    assert not is_compact(layer.weight) and has_compact_weights(compact)
    assert torch.equal(all_logits(compact, 9), all_logits(wide, 9))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_saved_in_float32(tmp_path: Path, tied: bool) -> None:
    folder = checkpoint(tmp_path / "model", torch.bfloat16, tie_word_embeddings=tied)
    models = {
        kind: load(ModelConfig(str(folder), device="cpu", dtype=kind)).target.model for kind in ("auto", "float32")
    }
    files = {}
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind)
        files[kind] = load_file(tmp_path / kind / "model.safetensors")
    assert {tensor.dtype for tensor in files["auto"].values()} == {torch.float32}
    assert files["auto"].keys() == files["float32"].keys()
    assert all(torch.equal(tensor, files["float32"][name]) for name, tensor in files["auto"].items())
    assert has_compact_weights(models["auto"])
