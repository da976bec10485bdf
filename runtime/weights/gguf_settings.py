"""Restores the settings that transformers misreads or doesn't read from a GGUF file: gpt-oss's, and Llama 3's RoPE."""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.notes import note
from hdtool.runtime.weights.gguf_file import GGUFFile

GPT_OSS = "gpt-oss"
GPT_OSS_END_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")
"""Tokens that end an answer according to the original generation settings; a file states only the first."""
SCALING_TYPE = "yarn"
SCALING = "rope.scaling."
MISREAD = f"{GPT_OSS}.{SCALING}"
"""Prefix of the keys of RoPE scaling; transformers mistakes the lengths of these keys for the values."""
INTEGERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}
"""Names of gpt-oss's integer settings in a file, with the names of these settings in transformers."""
EPSILON, THETA = "attention.layer_norm_rms_epsilon", "rope.freq_base"
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
"""RoPE scaling of the published models, used for settings that a file lacks."""
STORED_YARN = {
    "factor": "factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "original_context_length": "original_max_position_embeddings",
}
LAYER_TYPES = ("sliding_attention", "full_attention")
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 to 3.3, whose models differ only in the factor."""


def restore_settings(settings: Any, file: GGUFFile) -> None:
    """Restore the settings that transformers doesn't read from a GGUF file; print a note if a RoPE scaling is unknown.

    These are some settings of gpt-oss, and the RoPE scaling of Llama 3, for which GGUF files have no setting, only a
    tensor with the divisor of each frequency.
    """
    is_gpt_oss = file.architecture == GPT_OSS
    if is_gpt_oss:
        for name, value in gpt_oss_settings(file.header.values).items():
            setattr(settings, name, value)
    scaling = file.header.values.get(f"{file.architecture}.{SCALING}type", "none")
    factors = [name for name in file.tensors if name in FACTORS]
    if not factors and (scaling == "none" or (is_gpt_oss and scaling == SCALING_TYPE)):
        return
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    if scaling == "none" and factors == [FACTORS[0]] and (piece := file.tensors[FACTORS[0]]).format == "F32":
        divisors = np.fromfile(piece.file, "<f4", piece.rows, offset=piece.offset)
        factor = round(float(divisors.max(initial=1)), 3)
        if rope.get("rope_type") == "default" and _are_of_llama_3(divisors, rope["rope_theta"], factor):
            settings.rope_parameters = {**rope, **LLAMA_3, "rope_type": "llama3", "factor": factor}
            return
    what = factors[0] if factors else f"of type {scaling}"
    note(
        f"{file.path} scales its rotary positions ({what}), which transformers "
        f"{metadata.version('transformers')} does not read: answers differ from those of the original model"
    )


def gpt_oss_settings(stored: dict[str, Any]) -> dict[str, Any]:
    """Return gpt-oss's configuration settings from a file's metadata; raise a ``ValueError`` if one is missing."""
    values = {name.removeprefix(f"{GPT_OSS}."): value for name, value in stored.items()}
    if lacking := [name for name in (*INTEGERS, EPSILON, THETA) if name not in values]:
        raise ValueError(f"it lacks the setting {GPT_OSS}.{lacking[0]}")
    return {
        **{name: values[stored] for stored, name in INTEGERS.items()},
        "layer_types": [LAYER_TYPES[layer % 2] for layer in range(values["block_count"])],
        "rms_norm_eps": _decimal(values[EPSILON]),
        "rope_parameters": {"rope_theta": _decimal(values[THETA]), **_yarn(values)},
    }


def _yarn(values: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE scaling settings.

    Files don't state ``truncate``. It is False in the published models: bounds aren't rounded to whole dimensions.
    """
    if values.get(f"{SCALING}type") != SCALING_TYPE:
        return {"rope_type": "default"}
    stored = {name: values.get(SCALING + key, YARN[name]) for key, name in STORED_YARN.items()}
    read = {name: _decimal(value) if isinstance(value, float) else value for name, value in stored.items()}
    return {"rope_type": SCALING_TYPE, "truncate": False, **read}


def _decimal(number: float) -> float:
    """Return the shortest decimal number that rounds to this float32 value, as found in the original configuration."""
    return float(str(np.float32(number)))


def _are_of_llama_3(divisors: npt.NDArray[np.float32], theta: float, factor: float) -> bool:
    """Return True if ``divisors`` are Llama 3's, which go from ``factor`` for low frequencies to 1 for high ones."""
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = LLAMA_3["low_freq_factor"], LLAMA_3["high_freq_factor"]
    share = (LLAMA_3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(share, 0, 1)
    return bool(np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3))
