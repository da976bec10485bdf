"""int8 and int4 weights of torchao that stay packed: the bits, the tokens and the rows of the expanded model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch.nn import Linear, Module, Parameter
from transformers import AutoTokenizer, TorchAoConfig

from hdtool.cli.app import run as command
from hdtool.data import demo
from hdtool.runtime.kernels.compact_weight import is_compact, is_packed
from hdtool.runtime.kernels.gemm_tiles import TILE_OUT_FEATURES
from hdtool.runtime.kernels.linear_layers import compiled_linear
from hdtool.runtime.kernels.matrix_formats import INT8
from hdtool.runtime.kernels.packed_matrix import packed_int4, packed_int8, packed_weight
from hdtool.runtime.model import compact_layers
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, assert_lossless
from tests.support.gguf_files import VOCABULARY, tiny_llama
from tests.support.oracle import all_logits

pytestmark = pytest.mark.filterwarnings("default")  # those of torchao
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [token % VOCABULARY for token in range(3, 600, 29)]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


@st.composite
def levels_and_scales(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """With a scale for all weights, for each row, or for a group of columns of each row."""
    outs, groups = draw(st.integers(1, 2 * TILE_OUT_FEATURES)), draw(st.sampled_from([1, 2, 3]))
    group = INT8.block_size * draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    levels = torch.randint(-128, 128, (outs, groups * group), dtype=torch.int8)
    scales = torch.randn(draw(st.sampled_from([1, outs])), groups, dtype=draw(st.sampled_from(DTYPES)))
    return levels, scales, group


@given(levels_and_scales())
@settings(deadline=None)
def test_numbers_of_8_bits_are_kept(given: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    levels, scales, group = given
    matrix = packed_int8(levels, scales, group)
    assert matrix is not None
    assert matrix.nbytes == levels.numel() + levels.numel() // INT8.block_size * 4
    wide = levels.float() * scales.float().repeat_interleave(group, 1)
    assert torch.equal(matrix.float(), wide)


@given(levels_and_scales())
@settings(deadline=None)
def test_numbers_of_4_bits_are_kept(given: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    levels, scales, group = given
    levels, minima = levels >> 4, torch.randn_like(scales)
    matrix = packed_int4(two_in_a_byte(levels), scales, minima, group)
    assert matrix is not None
    scale, minimum = (numbers.float().repeat_interleave(group, 1) for numbers in (scales, minima))
    wide = levels.float() * scale + minimum
    assert torch.equal(matrix.float(), wide)


def two_in_a_byte(levels: torch.Tensor) -> torch.Tensor:
    """As the library packs integers of 4 bits: the first of two columns in the lower half."""
    octets = levels.view(torch.uint8)
    return octets[:, ::2] & 15 | octets[:, 1::2] << 4


@pytest.mark.parametrize(
    ("levels", "scales", "group"),
    [
        ((8, 96), (8, 1), 96),
        ((8, 128), (8, 4), 32),
        ((8, 128), (7, 1), 128),
        ((8, 128), (8,), 128),
        ((0, 64), (0, 1), 64),
    ],
)
def test_other_shapes_are_not_packed(levels: tuple[int, ...], scales: tuple[int, ...], group: int) -> None:
    assert packed_int8(torch.ones(levels, dtype=torch.int8), torch.ones(scales), group) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_the_library(torchao: Any, dtype: torch.dtype) -> None:
    numbers = torch.randn(5, 256)
    for how in (torchao.PerRow(), torchao.PerTensor(), torchao.PerGroup(64), torchao.PerGroup(32)):
        layer: Any = Linear(256, 24, bias=False, dtype=dtype)
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(granularity=how))
        found = packed_weight(layer.weight)
        if how == torchao.PerGroup(32) or (how == torchao.PerGroup(64) and dtype == torch.bfloat16):
            assert found is None, "the library rounds these, or they have other groups"
            continue
        assert found is not None
        assert torch.equal(found.float(), layer.weight.dequantize(torch.float32))
        torch.testing.assert_close(compiled_linear(numbers, found), layer(numbers), rtol=1e-5, atol=1e-5)


def test_weights_of_other_kinds_are_not_packed(torchao: Any) -> None:
    layer: Any = torch.nn.Sequential(Linear(128, 32, bias=False))
    assert packed_weight(layer[0].weight) is None
    for how in (torchao.Int8DynamicActivationInt8WeightConfig(), torchao.IntxWeightOnlyConfig(torch.int8)):
        other = copy.deepcopy(layer)
        torchao.quantize_(other, how)
        assert type(other[0].weight) is not Parameter
        assert packed_weight(other[0].weight) is None
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    assert packed_weight(layer[0].weight) is not None
    layer[0].weight.zero_point.fill_(1)
    assert packed_weight(layer[0].weight) is None


def in_int4(torchao: Any, weight: torch.Tensor, group: int, dtype: torch.dtype) -> Any:
    """As ``Int4WeightOnlyConfig`` quantizes a weight, which needs a GPU: the integers -8 to 7, scaled and shifted."""
    parts = weight.detach().view(len(weight), -1, group)
    lowest, highest = parts.amin(-1), parts.amax(-1)
    scales = ((highest - lowest) / 15).clamp_min(1e-6)
    levels = ((parts - lowest[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.int8) - 8
    columns = two_in_a_byte(levels.view(weight.shape)).view(torch.int8)
    scales, minima = (one.to(dtype).t().contiguous() for one in (scales, lowest + 8 * scales))
    return torchao.Int4Tensor(columns, scales, minima, [1, group], weight.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_of_4_bits(torchao: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """torchao has no matmul for them on a CPU."""
    weight = torch.randn(24, 256)
    quantized = in_int4(torchao, weight, 128, dtype)
    found = packed_weight(quantized)
    assert found is not None and found.nbytes == 24 * 256 // 64 * 40
    assert (found.float() - weight).abs().max() < 0.5
    assert packed_weight(in_int4(torchao, weight, 32, dtype)) is None, "the groups are smaller than blocks"
    quantized.activation_dtype = torch.float8_e4m3fn
    assert packed_weight(quantized) is None
    model: Any = tiny_llama(**SHAPE)
    for layer in model.model.layers.modules():
        if isinstance(layer, Linear):
            layer.weight = Parameter(in_int4(torchao, layer.weight, 64, dtype), requires_grad=False)
    state, metadata = flatten(model.state_dict())
    model.config.quantization_config = TorchAoConfig(torchao.Int4WeightOnlyConfig(group_size=64))
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata | {"format": "pt"})
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(tmp_path)
    for activations in ("float32", "int8"):
        target = load(ModelConfig(str(tmp_path), device="cpu", activations=activations)).target
        assert len(packed_layers(target.model)) == 14 and target.compiled
        assert_lossless(target, PROMPT)


def flatten(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    found: tuple[dict[str, torch.Tensor], dict[str, str]] = support.flatten_tensor_state_dict(state)
    return found


def saved(folder: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> str:
    """A checkpoint in floating point; it is quantized on loading."""
    model: Any = tiny_llama(**(SHAPE | changed))
    model.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(folder)
    return str(folder)


def target_of(folder: str, **options: Any) -> Target:
    return load(ModelConfig(folder, device="cpu", quantization="int8", **options)).target


def packed_layers(model: Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear) and is_packed(module.weight)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_logits_and_answers_are_those_of_the_expanded_model(
    torchao: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(tmp_path, dtype)
    packed, library = target_of(folder), target_of(folder, dtype="float32")
    assert packed.dtype == library.dtype == torch.float32
    assert len(packed_layers(packed.model)) == 14 and packed.compiled
    assert not any(map(is_compact, library.model.parameters())) and not library.compiled
    wide = target_of(folder)
    for layer in packed_layers(wide.model):
        layer.weight = Parameter(layer.weight.stored.float(), requires_grad=False)  # type: ignore[attr-defined]
    for length in (1, 2, 5, 16, 64, 65, 100):
        found = all_logits(packed.model, length)
        assert torch.equal(found, all_logits(wide.model, length)), length
        expected = all_logits(library.model, length)
        assert (found - expected).norm() < 1e-4 * expected.norm(), "rounded in another order"
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]):
        assert_lossless(packed, PROMPT, sampling, expected=answer_of(wide, PROMPT, sampling))
        assert_lossless(target_of(folder, activations="int8"), PROMPT, sampling)


def test_layers_that_no_matmul_takes_are_those_of_the_library(torchao: Any, tmp_path: Path) -> None:
    target = target_of(saved(tmp_path, intermediate_size=480))
    odd = {type(layer.mlp.down_proj.weight).__name__ for layer in target.model.model.layers}
    assert odd == {"Int8Tensor"} and len(packed_layers(target.model)) == 12
    assert_lossless(target, PROMPT)


def test_without_linear_layers_nothing_is_packed(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_llama(**SHAPE)
    assert not compact_layers.pack_weights(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    first = model.model.layers[0].mlp.up_proj
    first.__class__ = type("Adapted", (Linear,), {})
    assert compact_layers.pack_weights(model)
    assert type(first.weight).__name__ == "Int8Tensor"
    assert len(packed_layers(model)) == 14  # the output layer too
    model = tiny_llama(**SHAPE)
    model.to(torch.bfloat16)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert not compact_layers.pack_weights(model), "it computes in bfloat16"


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_methods_are_lossless(
    torchao: Any, activations: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--quantization", "int8", "--num-prompts", "3", "--max-new-tokens", "24", "--activations", activations)
    assert command(["verify", "--model", saved(tmp_path), *options]) == 0
    assert "3 of 3" in capfd.readouterr().out
