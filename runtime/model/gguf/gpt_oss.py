"""Reads what transformers misreads in GGUF files of gpt-oss: configuration settings and the tensors of experts.

``convert`` applies the settings, and passes the tensors of experts to transformers under the names from this module.
The names and shapes in a file are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.gguf_header import GGUFHeader

ARCHITECTURE = "gpt-oss"
END_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")
"""Tokens that end an answer according to the original generation settings; a file states only the first."""
SCALING_TYPE = "yarn"
SCALING = "rope.scaling."
"""Prefix of the names of RoPE scaling settings; transformers mistakes the lengths of these names for the values."""
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
"""Names of integer settings in a file, with the names of these settings in transformers."""
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


def settings_of(header: GGUFHeader) -> dict[str, Any]:
    """Return the configuration settings stated in a file's header; raise a ``ValueError`` if one is missing."""
    values = {name.removeprefix(f"{ARCHITECTURE}."): value for name, value in header.values.items()}
    if lacking := [name for name in (*INTEGERS, EPSILON, THETA) if name not in values]:
        raise ValueError(f"it lacks the setting {ARCHITECTURE}.{lacking[0]}")
    return {
        **{name: values[stored] for stored, name in INTEGERS.items()},
        "layer_types": [LAYER_TYPES[layer % 2] for layer in range(values["block_count"])],
        "rms_norm_eps": _decimal(values[EPSILON]),
        "rope_parameters": {"rope_theta": _decimal(values[THETA]), **_scaling(values)},
    }


def _scaling(values: dict[str, Any]) -> dict[str, Any]:
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


PARAMETER = re.compile(r"layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<part>gate_up|down)_proj(?P<bias>_bias)?$")
TENSOR = re.compile(r"(?P<layer>blk\.\d+)\.ffn_(?P<part>gate|up|down)_exps\.(?P<kind>weight|bias)$")


def tensor_name(parameter: str) -> str | None:
    """Return the name that ``ExpertTensors`` gives to an expert parameter's tensor, or None for other parameters."""
    match = PARAMETER.search(parameter)
    return match and f"blk.{match['layer']}.ffn_{match['part']}_exps.{'bias' if match['bias'] else 'weight'}"


class ExpertTensors:
    """Joins and transposes a file's expert tensors into the layout of the model's parameters."""

    def __init__(self) -> None:
        self._halves: dict[str, npt.NDArray[np.float32]] = {}

    def read(self, name: str, values: npt.NDArray[np.float32]) -> tuple[str, npt.NDArray[np.float32]]:
        """Return a tensor's name and values in the model's layout; tensors that don't belong to experts are unchanged.

        The gate and up tensors are joined with alternating rows; the name is empty for whichever is read first.
        """
        match = TENSOR.match(name)
        if match is None:
            return name, values
        if match["part"] != "down":
            name, half = f"{match['layer']}.ffn_gate_up_exps.{match['kind']}", int(match["part"] == "up")
            is_first = name not in self._halves
            if is_first:
                self._halves[name] = np.empty((*values.shape[:2], 2, *values.shape[2:]), np.float32)
            self._halves[name][:, :, half] = values
            if is_first:
                return "", values
            values = self._halves.pop(name).reshape(len(values), -1, *values.shape[2:])
        return name, values.swapaxes(1, 2) if match["kind"] == "weight" else values
