"""Experts of GGUF files, of checkpoints in MXFP4, or quantized on loading: they stay in blocks.

Only experts to which a row is routed are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils.quantization_config import Mxfp4Config

from hdtool.data import demo
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compact_weight import CompactWeight, is_compact, is_packed
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME
from hdtool.runtime.kernels.mixture_of_experts import CompiledExperts
from hdtool.runtime.kernels.packed_matrix import PackedExperts
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load, load_stock
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, assert_lossless
from tests.support.described import GEMMA4, YARN
from tests.support.families import ALTERNATING, random_model
from tests.support.fused import TREE, after, compiled, logits_of
from tests.support.gguf_files import write_experts_gguf
from tests.support.oracle import assert_same_logits, plain_logits
from tests.support.packed_blocks import needs_blocks, some_matrix

pytestmark = [needs_blocks, pytest.mark.usefixtures("home")]
PROMPT = [place * 17 % 90 + 2 for place in range(40)]


def loaded(file: Path, **options: Any) -> Target:
    return load(ModelConfig(str(file), device="cpu", **options)).target


def experts_of(target: Target) -> list[Any]:
    return [module for module in target.model.modules() if type(module) is CompiledExperts]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.one_in(2)
def test_logits_have_the_bits_of_the_expanded_model(kind: str, tmp_path: Path) -> None:
    file = write_experts_gguf(tmp_path / "moe.gguf", kind)
    packed, wide = loaded(file), loaded(file, dtype="float32")
    weights = [weight for one in experts_of(packed) for weight in one.parameters()]
    assert len(weights) == 4 and all(map(is_packed, weights)) and not any(map(is_compact, wide.model.parameters()))
    assert torch.equal(logits_of(packed, PROMPT), logits_of(wide, PROMPT))
    assert compiled(packed).is_current and compiled(wide).is_current
    assert answer_of(packed, PROMPT, max_new_tokens=20) == answer_of(wide, PROMPT, max_new_tokens=20)
    assert not any(weight.expansions.count for weight in weights), "no pass expanded all experts of a layer"
    for one in experts_of(packed):
        parts = [len(one.get_parameter(name).stored.parts) for name in ("gate_up_proj", "down_proj")]
        assert parts == [2, 1], "gates and ups are not copied together"


@torch.inference_mode()
def test_int8_activations_multiply_by_the_experts(tmp_path: Path) -> None:
    """A row has the same bits in each pass, and almost the numbers of activations in float32."""
    file = write_experts_gguf(tmp_path / "moe.gguf", "Q8_0")
    rounded, usual = loaded(file, activations="int8"), loaded(file)
    of_tree, expected = logits_of(rounded, PROMPT), logits_of(usual, PROMPT)
    distance = (of_tree - expected).norm() / expected.norm()
    assert 1e-4 < distance < 0.05
    alone = after(rounded, PROMPT)
    for row, token in ((0, TREE.root), (1, int(TREE.tokens[0]))):
        assert torch.equal(alone.verify(DraftTree.bare(token))[0], of_tree[row])
        alone.commit()
    made = compiled(rounded)
    of_experts = {part.data_ptr() for one in experts_of(rounded) for w in one.parameters() for part in w.stored.parts}
    assert of_experts <= made.table._panels.keys()


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_parts_are_read_as_one_tensor(is_transposed: bool, is_interleaved: bool) -> None:
    format = FORMATS_BY_NAME["Q8_0"]
    parts = [some_matrix(format, 3 * 32, 64, seed) for seed in range(2)]
    stored = PackedExperts(parts, 3, is_transposed=is_transposed, is_interleaved=is_interleaved)
    halves = [part.float().view(3, 32, 64) for part in parts]
    whole = torch.stack(halves, 2).view(3, 64, 64) if is_interleaved else torch.cat(halves, 1)
    expected = whole.transpose(1, 2) if is_transposed else whole
    weight = CompactWeight(stored)
    assert weight.shape == expected.shape and weight.stride() == expected.stride()
    assert torch.equal(weight + 0, expected)
    assert torch.equal(weight.transpose(1, 2) + 0, expected.transpose(1, 2))
    weight.expansions.count = 0
    for one in (1, -1):
        assert torch.equal(weight[one] + 0, expected[one])
    assert torch.equal(weight[1:] + 0, expected[1:])
    weight.expansions.count = 0
    chosen = torch.tensor([[2, 0], [-1, 1]])
    assert torch.equal(weight[chosen], expected[chosen]) and not weight.expansions.count


def checkpoint_in_mxfp4(folder: Path) -> Path:
    """A gpt-oss as it is published: experts in blocks, all else in 16 bits."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model: Any = random_model(
        "GptOss", hidden_size=64, intermediate_size=128, head_dim=64, vocab_size=2048, initializer_range=0.3,
        sliding_window=24, layer_types=ALTERNATING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN,
    )  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    for name, weight in model.bfloat16().state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = weight.contiguous()
            continue
        experts, columns, rows = weight.shape
        blocks = experts, rows, columns // 32
        state[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), generator=random, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(120, 126, blocks, generator=random, dtype=torch.uint8)
    model.config.quantization_config = Mxfp4Config(modules_to_not_convert=["self_attn", "router", "embed", "lm_head"])
    model.config.architectures = ["GptOssForCausalLM"]
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(folder)
    return folder


def test_experts_of_gpt_oss_stay_in_the_blocks_of_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint_in_mxfp4(tmp_path)
    packed, wide, rounded = (loaded(folder, **given) for given in ({}, {"dtype": "float32"}, {"activations": "int8"}))
    weights, expanded = (
        [one.get_parameter(name) for one in experts_of(target) for name in ("gate_up_proj", "down_proj")]
        for target in (packed, wide)
    )
    assert all(map(is_packed, weights)) and not any(map(is_compact, expanded))
    assert all(torch.equal(one + 0, other) for one, other in zip(weights, expanded, strict=True))
    assert compiled(packed).is_current and compiled(wide).is_current
    expected = logits_of(wide, PROMPT)
    assert torch.equal(logits_of(packed, PROMPT), expected)
    assert 1e-4 < (logits_of(rounded, PROMPT) - expected).norm() / expected.norm() < 0.05
    assert_same_logits(expected[0], plain_logits(packed.model, [*PROMPT, TREE.root]))


def test_logits_are_those_of_the_library(tmp_path: Path) -> None:
    target = loaded(write_experts_gguf(tmp_path / "moe.gguf", "Q4_K"))
    assert_same_logits(logits_of(target, PROMPT)[0], plain_logits(target.model, [*PROMPT, TREE.root]))


MIXTURES: dict[str, dict[str, Any]] = {
    "GptOss": {"sliding_window": 24, "layer_types": ALTERNATING, "num_local_experts": 4, "rope_parameters": YARN},
    "Qwen3Moe": {"num_experts": 32, "moe_intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "GraniteMoe": {"num_local_experts": 4},
    "Gemma4Text": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}
"""Settings by family: transposed experts, plain ones, and ones beside a shared expert or an MLP."""


def checkpoint_of(family: str, folder: Path, **changed: Any) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 2048, "num_experts_per_tok": 2}
    without = ("head_dim",) if family == "GraniteMoe" else ()
    random_model(family, without, **{**shape, **MIXTURES[family], **changed}).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("scheme", ["q4_0", "q8_0"])
def test_experts_are_quantized_on_loading_and_routers_are_not(family: str, scheme: str, tmp_path: Path) -> None:
    folder = checkpoint_of(family, tmp_path / "tiny")
    packed = loaded(folder, quantization=scheme)
    stock = load_stock(ModelConfig(str(folder), device="cpu", quantization=scheme))
    kinds = {name: weight.stored.format.name for name, weight in packed.model.named_parameters() if is_packed(weight)}
    weights = [name for name in kinds if name.endswith(("gate_up_proj", "down_proj"))]
    layers = packed.model.config.num_hidden_layers
    assert len(weights) == 2 * layers and {kinds[name] for name in weights} == {scheme.upper()}
    assert not any("router" in name or name.endswith("mlp.gate.weight") for name in kinds)
    assert sum(name.endswith("k_proj.weight") for name in kinds) == layers
    original = load_stock(ModelConfig(str(folder), device="cpu", dtype="float32"))
    for name in weights:
        rounded, exact = stock.get_parameter(name), original.get_parameter(name)
        assert torch.equal(packed.model.get_parameter(name) + 0, rounded)
        assert 0 < (rounded - exact).norm() / exact.norm() < (0.2 if scheme == "q4_0" else 0.01)
    assert compiled(packed).is_current
    assert_same_logits(logits_of(packed, PROMPT)[0], plain_logits(stock, [*PROMPT, TREE.root]))


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_drafts_change_no_answer_of_quantized_experts(activations: str, tmp_path: Path) -> None:
    target = loaded(checkpoint_of("Qwen3Moe", tmp_path / "tiny"), quantization="q4_0", activations=activations)
    assert compiled(target).activations_are_int8 == (activations == "int8")
    assert_lossless(target, PROMPT)


def test_a_later_start_reads_quantized_experts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint_of("GptOss", tmp_path / "tiny")
    first = logits_of(loaded(folder, quantization="q8_0"), PROMPT)
    assert torch.equal(logits_of(loaded(folder, quantization="q8_0"), PROMPT), first)
    assert capfd.readouterr().err.count("note: quantizing") == 1


def test_experts_whose_columns_are_no_multiple_of_a_block_stay_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = loaded(checkpoint_of("Qwen3Moe", tmp_path / "tiny", moe_intermediate_size=48), quantization="q8_0")
    assert "note: 4 of " in capfd.readouterr().err
    assert not any(is_packed(weight) for name, weight in target.model.named_parameters() if "experts" in name)
