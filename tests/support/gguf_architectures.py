"""Tiny GGUF files of every decoder architecture that transformers reads from GGUF, with random tensors.

A file's metadata decides the model's configuration, as transformers reads it, and the empty model of this configuration
decides the names and shapes of the tensors. Sizes differ wherever an architecture allows it, so that hardly any matrix
is square.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TensorNameMap,
    get_tensor_name_map,
)
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

try:
    from transformers.integrations.gguf.dequant import GGML_NAME
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
except ImportError:  # before 5.23
    GGUF_ARCHS, GGML_NAME = {}, {}

from tests.support.gguf_files import add_tokenizer, written
from tests.support.packed_blocks import SCALES

VOCABULARY, LAYERS = 301, 2
COMMON: dict[str, Any] = {
    "context_length": 512,
    "embedding_length": 256,
    "feed_forward_length": 768,
    "block_count": LAYERS,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": VOCABULARY,
}
"""Metadata of all architectures; transformers ignores what an architecture doesn't have."""
DELTA: dict[str, Any] = {
    "attention.head_count": 8,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 6 * 128,
}
"""Metadata of a delta rule with three value heads per key head."""
WIDE: dict[str, Any] = {"attention.head_count": 8, "attention.key_length": 64, "rope.dimension_count": 64}
"""Metadata of an attention that is wider than the model."""
EXPERTS: dict[str, Any] = {"expert_count": 3, "expert_used_count": 2}


@dataclass(frozen=True)
class Architecture:
    """What distinguishes the files of an architecture."""

    name: str
    """Name of the architecture in the file."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata beside ``COMMON``, and in place of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that transformers doesn't read from a file."""
    tensors: tuple[str, ...] = ("output.weight",)
    """Tensors from whose presence transformers infers settings."""
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of tensors of the file that are no weights of the model."""
    model_name: str = "tiny"
    reason: str = ""
    """Why transformers can't read files of the architecture; empty if it can."""


TOO_NEW = "" if GGML_NAME else "transformers reads it since 5.23"
TORCH_ARCHITECTURES, TORCH_FORMATS = frozenset(GGUF_ARCHS), frozenset(GGML_NAME.values())
"""Architectures whose files transformers reads by torch instead of numpy, and the block formats that they may have."""
TIED: tuple[str, ...] = ()
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", WIDE, others={"rope_freqs.weight": (32,)}),
    "llama-tied": Architecture("llama", WIDE, tensors=TIED),
    "llama-biases": Architecture("llama", WIDE, {"attention_bias": True, "mlp_bias": True}),
    "mistral": Architecture(
        "llama",
        model_name="mistral",
        reason="transformers takes it for the architecture mistral, which gguf doesn't have",
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2moe", EXPERTS, {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3moe",
        {**EXPERTS, **WIDE},
        {"moe_intermediate_size": 768},
    ),
    "lfm2": Architecture("lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}, tensors=TIED),
    "qwen35": Architecture("qwen35", DELTA, reason=TOO_NEW),
    "qwen35-draft": Architecture(
        "qwen35",
        {**DELTA, "block_count": LAYERS + 1, "nextn_predict_layers": 1},
        reason=TOO_NEW,
        others={f"blk.{LAYERS}.nextn.eh_proj.weight": (256, 512), f"blk.{LAYERS}.attn_norm.weight": (256,)},
    ),
    "qwen35moe": Architecture(
        "qwen35moe",
        {**DELTA, **EXPERTS, "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 1024},
        reason=TOO_NEW,
    ),
    "falcon": Architecture("falcon", tensors=TIED),
    "falcon-output": Architecture("falcon"),
    "falcon-40b": Architecture("falcon", settings={"new_decoder_architecture": True, "num_kv_heads": 2}, tensors=TIED),
    "phi3": Architecture("phi3"),
    "bloom": Architecture("bloom", tensors=TIED),
    "bloom-output": Architecture("bloom"),
    "stablelm": Architecture("stablelm", tensors=("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_norm.weight")),
    "stablelm-parallel": Architecture("stablelm"),
    "gpt2": Architecture("gpt2"),
    "gpt2-tied": Architecture("gpt2", tensors=TIED),
    "starcoder2": Architecture("starcoder2"),
    "mamba": Architecture(
        "mamba",
        {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 64, "ssm.inner_size": 512},
        tensors=TIED,
    ),
    "nemotron": Architecture("nemotron"),
    "gemma2": Architecture("gemma2", WIDE, tensors=TIED),
    "gemma3": Architecture("gemma3", WIDE, tensors=TIED),
    "gemma4": Architecture(
        "gemma4",
        {"attention.key_length": 128},
        {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 128},
        tensors=TIED,
    ),
    "minimax-m2": Architecture("minimax-m2", {**EXPERTS, **WIDE, "rope.dimension_count": 32}),
    "deci": Architecture("deci", reason="transformers has no class for models of the type deci"),
}
"""Cases by name, except gpt-oss, whose tensors transformers doesn't find by itself."""
READABLE = [name for name, architecture in ARCHITECTURES.items() if not architecture.reason]

BLOCK_SCALES = {
    **{name: offsets for name, offsets in SCALES.items() if name in GGMLQuantizationType.__members__},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Offsets of the float16 scales in a block, or of the exponent in MXFP4."""
FLOAT32, FALLBACK = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
UNQUANTIZED = re.compile(r"conv1d|conv\.weight|ssm_(a|d)$|ffn_gate_inp|position_embd|layer_output_scale")
"""Names of tensors that stay in float32 in every file, as in llama.cpp's files."""

UNMAPPED = {
    r"layers\.(\d+)\.linear_attn\.dt_bias": r"blk.\1.ssm_dt.bias",
    r"layers\.(\d+)\.mlp\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias",
}
"""Patterns of parameter names that gguf's map of names lacks, with the names in the file."""
JOINED_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.gate_up_proj$")
TRANSPOSED = {"gpt2": re.compile(r"attn_qkv\.weight|ffn_(down|up)\.weight|attn_output\.weight")}


def write_architecture(path: Path, case: str, *kinds: str, tensors_of_part: int = 0) -> Any:
    """Write a file with matrices in the formats ``kinds``; return the configuration as transformers reads it.

    With several formats, even projections that become one weight differ in theirs. A matrix whose rows are no whole
    number of blocks is in Q8_0 or in float32. ``tensors_of_part`` splits the file into parts of so many tensors.
    """
    architecture = ARCHITECTURES[case]
    settings = settings_of(architecture)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings)
    writer = _writer(path, architecture, tensors_of_part)
    for name, shape in (*_tensors(architecture, model), *architecture.others.items()):
        # In these architectures, transformers joins only tensors of one format.
        chosen = name.replace("_gate_", "_up_") if architecture.name in TORCH_ARCHITECTURES else name
        stored = _kind(name, shape, GGMLQuantizationType[kinds[crc32(chosen.encode()) % len(kinds)]])
        writer.add_tensor(name, random_tensor(name, shape, stored), raw_dtype=stored)
    written(writer, path)
    return settings


def settings_of(architecture: Architecture) -> Any:
    """Return the configuration that transformers reads from the metadata, with what it can't read changed."""
    with TemporaryDirectory() as folder:
        path = write_metadata(Path(folder) / "metadata.gguf", architecture)
        return AutoConfig.from_pretrained(folder, gguf_file=path.name, **architecture.settings)


def write_metadata(path: Path, architecture: Architecture) -> Path:
    """Write a file that has only the tensors from whose presence transformers infers settings, each a single zero."""
    writer = _writer(path, architecture)
    for name in architecture.tensors or ("token_embd.weight",):
        writer.add_tensor(name, np.zeros(1, np.float32))
    return written(writer, path)


def random_tensor(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Return a tensor's content, which depends on its name; decays, which are read by their logarithm, are negative."""
    random = np.random.default_rng(crc32(name.encode()))
    size, count = GGML_QUANT_SIZES[kind]
    if size == 1:
        numbers = random.standard_normal(shape, np.float32)
        return np.asarray(quantize(-np.exp(numbers) if name.endswith("ssm_a") else numbers, kind))
    blocks = random.integers(0, 256, (prod(shape) // size, count), dtype=np.uint8)
    for first in BLOCK_SCALES[kind.name]:
        if kind == GGMLQuantizationType.MXFP4:
            blocks[:, first] = random.integers(110, 130, len(blocks))
            continue
        scales = (0.01 * random.standard_normal(len(blocks))).astype(np.float16)
        blocks[:, first : first + 2] = scales.reshape(-1, 1).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _writer(path: Path, architecture: Architecture, tensors_of_part: int = 0) -> GGUFWriter:
    writer = GGUFWriter(path, architecture.name, split_max_tensors=tensors_of_part)
    writer.add_name(architecture.model_name)
    for name, value in {**COMMON, **architecture.metadata}.items():
        key = f"{architecture.name}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    add_tokenizer(writer, VOCABULARY)
    return writer


def _tensors(architecture: Architecture, model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a file's tensors."""
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture.name], LAYERS)
    is_tied = "output.weight" not in architecture.tensors
    for parameter, weight in model.state_dict().items():
        if is_tied and parameter == "lm_head.weight":
            continue
        shape = tuple(weight.shape)
        if found := JOINED_EXPERTS.search(parameter):
            count, width, columns = shape
            for part in ("gate", "up"):
                yield f"blk.{found[1]}.ffn_{part}_exps.weight", (count, width // 2, columns)
            continue
        name = _file_name(names, parameter)
        yield name, _stored_shape(architecture.name, name, shape)


def _file_name(names: TensorNameMap, parameter: str) -> str:
    for pattern, stored in UNMAPPED.items():
        if found := re.search(f"{pattern}$", parameter):
            return found.expand(stored)
    base, dot, suffix = parameter.rpartition(".")
    if suffix not in ("weight", "bias"):
        base, dot, suffix = parameter, "", ""
    while (name := names.get_name(base)) is None:  # the map has some names of models without a head
        _, separator, base = base.partition(".")
        assert separator, parameter
    # Experts are a parameter of their own in the model, but a tensor like others in the file.
    return f"{name}.weight" if "_exps" in name else f"{name}{dot}{suffix}"


def _stored_shape(architecture: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if (pattern := TRANSPOSED.get(architecture)) and pattern.search(name):
        return shape[::-1]
    if "conv" in name and len(shape) == 3:
        return shape[0], shape[2]
    return shape[1:] if "ffn_gate_inp_shexp" in name else shape


def _kind(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(shape) < 2 or UNQUANTIZED.search(name):
        return FLOAT32
    return next(one for one in (kind, FALLBACK, FLOAT32) if not shape[-1] % GGML_QUANT_SIZES[one][0])
