"""GGUF files of random models of any size, for measurements."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import GptOssConfig, Lfm2Config, LlamaConfig

from tests.support.gguf_files import add_settings, add_tokenizer, written
from tests.support.gpt_oss_gguf import add_gpt_oss_settings
from tests.support.packed_blocks import NAMES, some_matrix

ATTENTION = "full_attention"
EXPERTS, ROUTER = "_exps", "ffn_gate_inp"
Settings = LlamaConfig | Lfm2Config | GptOssConfig


def write_random_gguf(path: Path, settings: Settings, kind: str, embedding: str) -> Path:
    """Write a model with random matrices in the format ``kind``.

    ``embedding`` is the format of the embedding table and, in a model with experts, of all matrices but the experts and
    the routers.
    """
    writer = GGUFWriter(path, settings.model_type.replace("_", "-"))
    add = {"lfm2": _add_lfm2, "gpt_oss": _add_gpt_oss}.get(settings.model_type, _add_llama)
    matrices, vectors = add(writer, settings)
    add_tokenizer(writer, settings.vocab_size)
    table = {"token_embd": (settings.vocab_size, settings.hidden_size)}
    has_experts = any(EXPERTS in name for name in matrices)
    for seed, (name, shape) in enumerate({**table, **matrices}.items()):
        is_expert = EXPERTS in name or not has_experts
        stored = "F32" if name.endswith(ROUTER) else kind if is_expert and name not in table else embedding
        writer.add_tensor(f"{name}.weight", _random(stored, shape, seed), raw_dtype=GGMLQuantizationType[stored])
    for name, sizes in vectors.items():
        tensor = name if name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor(tensor, np.full(sizes, 1.0 / (sizes[1] if len(sizes) > 1 else 1), np.float32))
    return written(writer, path)


Shapes = dict[str, tuple[int, ...]]


def _add_llama(writer: GGUFWriter, settings: Any) -> tuple[Shapes, Shapes]:
    """Add the metadata. Returns the shapes of the layers' matrices, and those of the tensors in float32."""
    add_settings(writer, settings)
    width, layers = settings.hidden_size, range(settings.num_hidden_layers)
    matrices = {
        f"blk.{n}.{name}": shape for n in layers for name, shape in (_attention(settings) | _mlp(settings)).items()
    }
    norms = [f"blk.{n}.{name}" for n in layers for name in ("attn_norm", "ffn_norm")]
    return matrices, dict.fromkeys(("output_norm", *norms), (width,))


def _add_lfm2(writer: GGUFWriter, settings: Any) -> tuple[Shapes, Shapes]:
    heads = [settings.num_key_value_heads if layer == ATTENTION else 0 for layer in settings.layer_types]
    add_settings(writer, settings, heads, settings.norm_eps)
    writer.add_shortconv_l_cache(settings.conv_L_cache)
    width, head = settings.hidden_size, settings.hidden_size // settings.num_attention_heads
    matrices: Shapes = {}
    vectors: Shapes = {"token_embd_norm": (width,)}
    for n, layer in enumerate(settings.layer_types):
        mixer: Shapes = {"shortconv.in_proj": (3 * width, width), "shortconv.out_proj": (width, width)}
        if layer == ATTENTION:
            mixer = _attention(settings)
            vectors |= {f"blk.{n}.{name}": (head,) for name in ("attn_q_norm", "attn_k_norm")}
        else:
            vectors[f"blk.{n}.shortconv.conv"] = (width, settings.conv_L_cache)
        matrices |= {f"blk.{n}.{name}": shape for name, shape in (mixer | _mlp(settings)).items()}
        vectors |= {f"blk.{n}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    return matrices, vectors


def _add_gpt_oss(writer: GGUFWriter, settings: Any) -> tuple[Shapes, Shapes]:
    add_gpt_oss_settings(writer, settings)
    width, inner, count = settings.hidden_size, settings.intermediate_size, settings.num_local_experts
    experts: Shapes = {f"ffn_{part}{EXPERTS}": (count, inner, width) for part in ("gate", "up")}
    experts[f"ffn_down{EXPERTS}"] = (count, width, inner)
    of_layer = _attention(settings) | experts | {ROUTER: (count, width)}
    biases = {f"{name}.bias": shape[:-1] for name, shape in of_layer.items()}
    norms = dict.fromkeys(("attn_norm", "post_attention_norm"), (width,))
    each = biases | norms | {"attn_sinks": (settings.num_attention_heads,)}
    layers = range(settings.num_hidden_layers)
    matrices = {f"blk.{n}.{name}": shape for n in layers for name, shape in of_layer.items()}
    vectors = {f"blk.{n}.{name}": sizes for n in layers for name, sizes in each.items()}
    return {"output": (settings.vocab_size, width), **matrices}, {"output_norm": (width,), **vectors}


def _attention(settings: Any) -> Shapes:
    width = settings.hidden_size
    head = getattr(settings, "head_dim", None) or width // settings.num_attention_heads
    wide, narrow = settings.num_attention_heads * head, settings.num_key_value_heads * head
    return {
        "attn_q": (wide, width),
        "attn_k": (narrow, width),
        "attn_v": (narrow, width),
        "attn_output": (width, wide),
    }


def _mlp(settings: Any) -> Shapes:
    width, inner = settings.hidden_size, settings.intermediate_size
    return {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}


def _random(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a random matrix in a tensor format."""
    if kind in ("BF16", "F32"):
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[1] ** 0.5
        return np.asarray(numbers if kind == "F32" else numbers.bfloat16().view(torch.uint8))
    *rows, columns = shape
    return np.asarray(some_matrix(NAMES[kind], prod(rows), columns, seed).blocks).reshape(*rows, -1)
