"""Describes model types that normalize with LayerNorms instead of RMSNorms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hdtool.runtime.program.llama_like_families import (
    GELU,
    AttentionKind,
    EndsKind,
    Family,
    LayerKind,
    MlpKind,
    Names,
    NormKind,
    RotaryKind,
)

PYTORCH_NORM = NormKind(rounds=False, is_centered=True, has_bias=True)
"""PyTorch's LayerNorm, which has a bias and rounds only its result."""
ONE_NORM = ("input_layernorm", "", "", "")
GELU_ALONE = GELU | {"gelu_new"}
"""Activations of MLPs without a gate, for which a pass on a GPU calls the model's own module."""


COHERE2 = Family(
    norm=NormKind(rounds=False, is_centered=True),
    layer=LayerKind(norms=ONE_NORM, is_parallel=True),
    rotary=RotaryKind(
        rotates=lambda attention: attention.sliding_window is not None, is_interleaved=True, has_paired_tables=True
    ),
    ends=EndsKind(logit_factor="logit_scale"),
    settings=frozenset({"layer_norm_eps"}),
)
LAYER_NORM_FAMILIES: Mapping[str, Family] = {
    "cohere": replace(
        COHERE2,
        attention=AttentionKind(norms_each_head=True),
        rotary=replace(COHERE2.rotary, rotates=lambda attention: True),
        attributes=frozenset({"use_qk_norm"}),
        settings=frozenset({"layer_norm_eps", "use_qk_norm"}),
    ),
    "cohere2": COHERE2,
    "phi": Family(
        norm=PYTORCH_NORM,
        names=Names(
            gate="fc1",
            up="",
            down="fc2",
            activation="activation_fn",
            out="dense",
            head_norms=("q_layernorm", "k_layernorm"),
            last_norm="final_layernorm",
        ),
        layer=LayerKind(norms=ONE_NORM, is_parallel=True),
        rotary=RotaryKind(is_partial=True),
        mlp=MlpKind(activations=GELU_ALONE),
        attributes=frozenset({"qk_layernorm", "rotary_ndims"}),
        settings=frozenset({"embd_pdrop", "layer_norm_eps", "qk_layernorm", "resid_pdrop"}),
    ),
    "starcoder2": Family(
        norm=PYTORCH_NORM,
        names=Names(gate="c_fc", up="", down="c_proj", activation="act"),
        mlp=MlpKind(activations=GELU_ALONE),
        attributes=frozenset({"residual_dropout"}),
        settings=frozenset({"embedding_dropout", "norm_epsilon", "residual_dropout", "use_bias"}),
    ),
}
"""Families by the name of their package in ``transformers.models``."""
