"""GGUF files of tiny random gpt-oss models, with the names, shapes and settings that llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize

from tests.support.families import ALTERNATING, random_model
from tests.support.gguf_files import (
    END_OF_TEXT,
    END_OF_TURN,
    add_settings,
    add_tokenizer,
    blocks_of,
    vocabulary,
    written,
)

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}
"""Names of a layer's modules with a weight and a bias in a GGUF file, with their names in transformers."""
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
Weight = tuple[str, torch.Tensor]
"""A tensor's name in the file, and the part of the model's parameter with its values, as a view."""


def write_gpt_oss(path: Path, experts: str = "MXFP4", others: str = "Q8_0", **changed: Any) -> Any:
    """Write a model with experts in the format ``experts``, and matrices of attention and vocabulary in ``others``.

    Return the model, which has the values that the file has.
    """
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(vocabulary()["model"]["vocab"]), "hidden_size": 128, "intermediate_size": 192, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 131072, "sliding_window": 24, "layer_types": ALTERNATING, "rope_parameters": ROPE,
        "initializer_range": 0.2, "bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TURN, "pad_token_id": END_OF_TEXT,
    }  # fmt: skip
    model: Any = random_model("GptOss", **{**shape, **changed}).eval()
    writer = GGUFWriter(path, "gpt-oss")
    add_gpt_oss_settings(writer, model.config)
    add_tokenizer(writer, model.config.vocab_size, splitting="gpt-4o", end=END_OF_TURN)
    for name, part in _weights(model):
        is_plain = part.dim() == 1 or name.endswith(".bias") or "ffn_gate_inp" in name
        kind = GGMLQuantizationType["F32" if is_plain else experts if "_exps" in name else others]
        _add_weight(writer, name, part, kind)
    written(writer, path)
    return model


def add_gpt_oss_settings(writer: GGUFWriter, settings: Any) -> None:
    add_settings(writer, settings)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_sliding_window(settings.sliding_window)
    writer.add_expert_count(settings.num_local_experts)
    writer.add_expert_used_count(settings.num_experts_per_tok)
    writer.add_expert_feed_forward_length(settings.intermediate_size)
    rope = settings.rope_parameters
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _weights(model: Any) -> Iterator[Weight]:
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    yield "output.weight", model.lm_head.weight
    for number, layer in enumerate(model.model.layers):
        block, experts = f"blk.{number}.", layer.mlp.experts
        yield f"{block}attn_sinks.weight", layer.self_attn.sinks
        for short, long in (MATRICES | NORMS).items():
            module = layer.get_submodule(long)
            yield f"{block}{short}.weight", module.weight
            if short in MATRICES:
                yield f"{block}{short}.bias", module.bias
        for first, part in enumerate(("gate", "up")):
            yield f"{block}ffn_{part}_exps.weight", experts.gate_up_proj[..., first::2].transpose(1, 2)
            yield f"{block}ffn_{part}_exps.bias", experts.gate_up_proj_bias[:, first::2]
        yield f"{block}ffn_down_exps.weight", experts.down_proj.transpose(1, 2)
        yield f"{block}ffn_down_exps.bias", experts.down_proj_bias


@torch.no_grad()
def _add_weight(writer: GGUFWriter, name: str, part: torch.Tensor, kind: GGMLQuantizationType) -> None:
    """Add a tensor to the file, and round the model's values to those that the file has."""
    if part.dim() == 1 or name.endswith(".bias"):
        part.copy_(torch.randn(part.shape) / 2 + (1 if "norm" in name else 0))
    numbers = part.reshape(-1, part.shape[-1]).contiguous().numpy()
    blocks = numbers if kind == GGMLQuantizationType.F32 else blocks_of(numbers, kind)
    part.copy_(torch.from_numpy(np.array(dequantize(blocks, kind))).view(part.shape))
    writer.add_tensor(name, blocks.reshape(*part.shape[:-1], -1), raw_dtype=kind)
