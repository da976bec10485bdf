"""GGUF files of gpt-oss, as llama.cpp's converter writes them: configuration, weights, and experts in their blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compact_weight import is_compact, is_packed
from hdtool.runtime.kernels.mixture_of_experts import DOWN, GATE_UP, CompiledExperts
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_settings import gpt_oss_settings, restore_settings
from tests.support.decoding import SAMPLINGS, answer_of, assert_lossless
from tests.support.fused import TREE, after, compiled, logits_of
from tests.support.gpt_oss_gguf import ROPE, write_gpt_oss
from tests.support.oracle import assert_same_logits, plain_logits
from tests.support.packed_blocks import needs_blocks

pytestmark = pytest.mark.usefixtures("home")

PROMPT = [place * 17 % 90 + 4 for place in range(40)]


def loaded(file: Path, **options: Any) -> Target:
    return load(ModelConfig(str(file), device="cpu", **options)).target


def expert_weights(target: Target) -> list[Any]:
    experts = [module for module in target.model.modules() if type(module) is CompiledExperts]
    return [one.get_parameter(name) for one in experts for name in (GATE_UP, DOWN)]


PUBLISHED: dict[str, Any] = {
    "context_length": 131072,
    "embedding_length": 2880,
    "feed_forward_length": 2880,
    "block_count": 24,
    "attention.head_count": 64,
    "attention.head_count_kv": 8,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.sliding_window": 128,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
"""Settings in files of gpt-oss-20b, of which older ones lack those of YaRN's frequencies."""


def test_settings_are_those_of_the_original_configuration() -> None:
    original = GptOssConfig(num_hidden_layers=24, num_local_experts=32, rope_parameters=ROPE)
    stored = {f"gpt-oss.{name}": value for name, value in PUBLISHED.items()}
    settings = gpt_oss_settings(stored)
    assert settings == {name: getattr(original, name) for name in settings}
    del stored["gpt-oss.attention.key_length"]
    with pytest.raises(ValueError, match=r"lacks the setting gpt-oss\.attention\.key_length"):
        gpt_oss_settings(stored)


@needs_blocks
@pytest.mark.parametrize("kind", ["MXFP4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("Q8_0", "Q4_K"))])
def test_logits_have_the_bits_of_the_expanded_model(kind: str, tmp_path: Path) -> None:
    wider: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512} if kind == "Q4_K" else {}
    original = write_gpt_oss(tmp_path / "oss.gguf", kind, **wider)
    packed, wide = (loaded(tmp_path / "oss.gguf", **options) for options in ({}, {"dtype": "float32"}))
    state = wide.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in original.state_dict().items())
    weights = expert_weights(packed)
    assert len(weights) == 4 and all(map(is_packed, weights)) and not any(map(is_compact, wide.model.parameters()))
    assert [len(weight.stored.parts) for weight in weights] == [2, 1, 2, 1]
    expected = logits_of(wide, PROMPT)
    assert torch.equal(logits_of(packed, PROMPT), expected)
    assert_same_logits(expected[0], plain_logits(original, [*PROMPT, TREE.root]))
    assert compiled(packed).is_current and compiled(wide).is_current and packed.takes_trees
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]):
        assert_lossless(packed, PROMPT, sampling, 20, expected=answer_of(wide, PROMPT, sampling, 20))
    assert not any(weight.expansions.count for weight in weights), "no pass expanded all experts of a layer"


@needs_blocks
@torch.inference_mode()
def test_int8_activations_multiply_by_the_experts(tmp_path: Path) -> None:
    """A row has the same bits in each pass, and almost the numbers of activations in float32."""
    original = write_gpt_oss(tmp_path / "oss.gguf")
    rounded = loaded(tmp_path / "oss.gguf", activations="int8")
    of_tree, expected = logits_of(rounded, PROMPT), plain_logits(original, [*PROMPT, TREE.root])
    assert 1e-4 < (of_tree[0] - expected).norm() / expected.norm() < 0.05
    alone = after(rounded, PROMPT)
    for row, token in ((0, TREE.root), (1, int(TREE.tokens[0]))):
        assert torch.equal(alone.verify(DraftTree.bare(token))[0], of_tree[row])
        alone.commit()
    parts = {part.data_ptr() for weight in expert_weights(rounded) for part in weight.stored.parts}
    assert len(parts) == 6 and parts <= compiled(rounded).table._panels.keys()


@needs_blocks
@pytest.mark.long
def test_experts_that_no_matmul_takes_are_expanded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The gate and up matrices have 96 columns."""
    original = write_gpt_oss(tmp_path / "oss.gguf", hidden_size=96)
    target = loaded(tmp_path / "oss.gguf")
    assert not any(is_packed(weight) for weight in target.model.parameters() if weight.dim() == 3)
    found = plain_logits(target.model, PROMPT)
    assert_same_logits(found, plain_logits(original, PROMPT))
    assert "4 in MXFP4 with 96 columns" in capfd.readouterr().err


def test_a_scaling_that_is_not_known_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = GptOssConfig()
    values = {**PUBLISHED, "rope.scaling.type": "linear"}
    header = GGUFHeader(
        {"general.architecture": "gpt-oss"} | {f"gpt-oss.{name}": value for name, value in values.items()},
        (),
        0,
    )
    restore_settings(settings, GGUFFile((tmp_path,), header, {}))
    assert settings.rope_parameters == {"rope_type": "default", "rope_theta": 150000.0}
    assert "scales its rotary positions (of type linear)" in capfd.readouterr().err
