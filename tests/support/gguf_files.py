"""GGUF files with tiny random weights and the demo model's tokenizer, in the layout of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hdtool.data import demo
from tests.support.packed_blocks import NAMES, some_matrix

TEMPLATE = (demo.MODEL / "chat_template.jinja").read_text()
END_OF_TEXT, END_OF_TURN = 0, 1
VOCABULARY = 512
"""Number of tokens, the demo model's first; with all of them, a test would spend most of its time in gguf."""
HEADS, KEY_VALUE_HEADS = 4, 2
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's weights in a GGUF file, with their names in transformers."""


@cache
def vocabulary() -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads((demo.MODEL / "tokenizer.json").read_text())
    return tokenizer


def tiny_llama(seed: int = 0, **changed: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "tie_word_embeddings": False,
        **changed,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # with smaller weights, logits are too even to tell models apart
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: str = "F32",
    *,
    divisors: np.ndarray[Any, Any] | None = None,
    settings: Mapping[str, int | str] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Write a model with matrices in the format ``kind``.

    The library gguf cannot quantize to every format. In the others, the matrices are random. ``settings`` are added to
    the file's metadata, and ``divisors`` divide the rotary frequencies. ``max_tensors`` splits the model into files of
    so many tensors.
    """
    writer = GGUFWriter(path, "llama", split_max_tensors=max_tensors)
    add_settings(writer, model.config)
    add_tokenizer(writer, model.config.vocab_size)
    for name, value in (settings or {}).items():
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    for name, weight in _weights(model).items():
        kept = kind if weight.ndim > 1 else "F32"
        stored = GGMLQuantizationType[kept]
        writer.add_tensor(name, blocks_of(weight, stored), raw_dtype=stored)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    return written(writer, path)


EXPERT_LAYER = {
    **{name: LAYER[name] for name in LAYER if name.startswith("attn") or name == "ffn_norm"},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}


def write_experts_gguf(path: Path, kind: str, **changed: Any) -> Path:
    """Write a Qwen3-MoE with its matrices in the format ``kind``, except the routers.

    transformers assumes the expert width of the smallest Qwen3-MoE.
    """
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256,
        "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 512, "num_experts": 4, "num_experts_per_tok": 2,
        "initializer_range": 0.1, "tie_word_embeddings": False,
    }  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **changed}))
    writer = GGUFWriter(path, "qwen3moe")
    add_settings(writer, model.config)
    writer.add_expert_count(model.config.num_experts)
    writer.add_expert_used_count(model.config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(model.config.moe_intermediate_size)
    writer.add_key_length(model.config.head_dim)
    add_tokenizer(writer, model.config.vocab_size)
    named = {
        "token_embd": model.model.embed_tokens.weight,
        "output_norm": model.model.norm.weight,
        "output": model.lm_head.weight,
    }
    for number, layer in enumerate(model.model.layers):
        named |= {f"blk.{number}.{short}": layer.get_submodule(long).weight for short, long in EXPERT_LAYER.items()}
        gate, up = layer.mlp.experts.gate_up_proj.chunk(2, dim=1)
        of_experts = {"gate": gate, "up": up, "down": layer.mlp.experts.down_proj}
        named |= {f"blk.{number}.ffn_{part}_exps": weight for part, weight in of_experts.items()}
    for name, weight in named.items():
        stored = GGMLQuantizationType["F32" if weight.dim() == 1 or name.endswith("gate_inp") else kind]
        matrix = weight.detach().reshape(-1, weight.shape[-1]).numpy()
        numbers = matrix if stored == GGMLQuantizationType.F32 else blocks_of(matrix, stored)
        writer.add_tensor(f"{name}.weight", numbers.reshape(*weight.shape[:-1], -1), raw_dtype=stored)
    return written(writer, path)


def blocks_of(weight: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Quantize a matrix, or return random blocks of its shape in a format to which the library gguf can't quantize."""
    if kind.name.endswith("_K") or kind.name == "IQ4_NL":
        # IQ4_NL has numbers up to 127. Larger scales would give attention scores of hundreds, which magnify rounding.
        scale = 0.001 if kind.name == "IQ4_NL" else 0.01
        return some_matrix(NAMES[kind.name], len(weight), weight.shape[1], len(weight), scale).blocks.numpy()
    return quantize(weight, kind)


def _weights(model: LlamaForCausalLM) -> dict[str, np.ndarray[Any, Any]]:
    found = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    named = {
        "token_embd.weight": found["model.embed_tokens.weight"],
        "output_norm.weight": found["model.norm.weight"],
    }
    if "lm_head.weight" in found:
        named["output.weight"] = found["lm_head.weight"]
    heads = {"attn_q": HEADS, "attn_k": KEY_VALUE_HEADS}
    for layer in range(model.config.num_hidden_layers):
        for short, long in LAYER.items():
            weight = found[f"model.layers.{layer}.{long}.weight"]
            named[f"blk.{layer}.{short}.weight"] = _interleaved(weight, heads[short]) if short in heads else weight
    return named


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows as llama.cpp does, which rotates neighbouring rows instead of halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def add_settings(
    writer: GGUFWriter, settings: Any, key_value_heads: list[int] | None = None, epsilon: float | None = None
) -> None:
    """Add the metadata that families share. ``key_value_heads`` has one number per layer if the layers differ."""
    writer.add_name("tiny")
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(key_value_heads or settings.num_key_value_heads or settings.num_attention_heads)
    writer.add_layer_norm_rms_eps(epsilon or settings.rms_norm_eps)
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    rope: Any = settings.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(settings.vocab_size)


def written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter, size: int, *, splitting: str = "default", end: int = END_OF_TEXT) -> None:
    """Add the first ``size`` tokens of the demo model's tokenizer, padded with unused tokens.

    ``splitting`` names the rules by which text is split, and ``end`` is the token that ends an answer.
    """
    tokenizer = vocabulary()
    added = {one["id"] for one in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])[:size]
    merged = len(tokens) - len(tokenizer["model"]["vocab"])  # the last tokens are those that merges make
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    unused = size - len(tokens)
    writer.add_token_list([*(token for token, _ in tokens), *(f"[unused{number}]" for number in range(unused))])
    kinds = [TokenType.CONTROL if number in added else TokenType.NORMAL for _, number in tokens]
    writer.add_token_types(kinds + [TokenType.NORMAL] * unused)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"][: merged or None]])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
