"""Describes model types that normalize with LayerNorms instead of RMSNorms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdtool.runtime.program.model_families import GELU, Family, Names, NormKind

PYTORCH_NORM = NormKind(rounds=False, is_centered=True, has_bias=True)
"""LayerNorm of PyTorch."""
ONE_NORM = ("input_layernorm", "", "", "")
GELU_ALONE = GELU | {"gelu_new"}
"""Activations of MLPs without a gate, for which a pass on a GPU calls the model's own module."""


def _cohere(**changes: Any) -> Family:
    settings: frozenset[str] = changes.pop("settings", frozenset())
    return Family(
        norms=ONE_NORM,
        norm=NormKind(rounds=False, is_centered=True),
        is_parallel=True,
        is_interleaved=True,
        has_paired_tables=True,
        logit_factor="logit_scale",
        settings=settings | {"layer_norm_eps"},
        **changes,
    )


LAYER_NORM_FAMILIES: Mapping[str, Family] = {
    "cohere": _cohere(norms_each_head=True, attributes=frozenset({"use_qk_norm"}), settings=frozenset({"use_qk_norm"})),
    "cohere2": _cohere(rotates=lambda attention: attention.sliding_window is not None),
    "phi": Family(
        norms=ONE_NORM,
        norm=PYTORCH_NORM,
        is_parallel=True,
        is_partial=True,
        names=Names(
            gate="fc1",
            up="",
            down="fc2",
            activation="activation_fn",
            out="dense",
            head_norms=("q_layernorm", "k_layernorm"),
            last_norm="final_layernorm",
        ),
        activations=GELU_ALONE,
        attributes=frozenset({"qk_layernorm", "rotary_ndims"}),
        settings=frozenset({"embd_pdrop", "layer_norm_eps", "qk_layernorm", "resid_pdrop"}),
    ),
    "starcoder2": Family(
        norm=PYTORCH_NORM,
        names=Names(gate="c_fc", up="", down="c_proj", activation="act"),
        activations=GELU_ALONE,
        attributes=frozenset({"residual_dropout"}),
        settings=frozenset({"embedding_dropout", "norm_epsilon", "residual_dropout", "use_bias"}),
    ),
}
"""Families by the name of their package in ``transformers.models``."""
