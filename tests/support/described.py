"""Tiny models of the families that are described beside Llama, and a comparison with their own ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import ROOT, DraftTree
from tests.support.families import ALTERNATING, VOCABULARY, WINDOW, random_model
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.trees import path_to, tokens_to

WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
BOUNDS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LOCAL_AND_GLOBAL: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "exaone4": lambda: random_model("Exaone4", **WINDOWS),
    "gemma": lambda: random_model("Gemma"),
    "gemma2": lambda: random_model("Gemma2", **WINDOWS, **BOUNDS),
    "gemma3": lambda: random_model("Gemma3Text", **WINDOWS, rope_parameters=LOCAL_AND_GLOBAL),
    "glm": lambda: random_model("Glm"),
    "glm4": lambda: random_model("Glm4"),
    "glm4_moe": lambda: random_model(
        "Glm4Moe",
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": lambda: random_model("GptOss", **WINDOWS, **EXPERTS),
    "granite": lambda: random_model("Granite", **MULTIPLIERS),
    "mixtral": lambda: random_model("Mixtral", **EXPERTS),
    "olmo2": lambda: random_model("Olmo2"),
    "olmo3": lambda: random_model("Olmo3", **WINDOWS),
    "olmoe": lambda: random_model("Olmoe", without=("head_dim",), **EXPERTS),
    "phi3": lambda: random_model("Phi3"),
    "phi3, a part rotated": lambda: random_model("Phi3", partial_rotary_factor=0.5),
    "qwen2_moe": lambda: random_model(
        "Qwen2Moe", **EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_moe": lambda: random_model("Qwen3Moe", **EXPERTS, moe_intermediate_size=16),
    "qwen3_moe, some dense": lambda: random_model("Qwen3Moe", **EXPERTS, moe_intermediate_size=16, mlp_only_layers=[0]),
    "smollm3": lambda: random_model("SmolLM3", no_rope_layers=[1, 0]),
}


def model_of(name: str) -> Any:
    """A model whose norms, sinks and biases matter."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for part, weight in model.named_parameters():
        if any(word in part for word in ("norm", "sinks", "bias")):
            weight.data = torch.rand_like(weight) + 0.5
    return model


def assert_right(
    model: Any, target: Target, sizes: tuple[tuple[int, ...], ...], lengths: tuple[int, ...] = (40, 3, 75)
) -> None:
    """Trees of a batch, after contexts shorter and longer than windows, and accepted paths that move."""
    cache = target.allocate(len(lengths))
    contexts = [prompt_of(length) for length in lengths]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context, room=200)
    for batch in sizes:
        drafted = [
            DraftTree.of(
                5, [(7 * node + 2) % VOCABULARY for node in range(size)], [max(ROOT, node - 3) for node in range(size)]
            )
            for size in batch
        ]
        found = target.verify(cache, drafted)
        target.wait()
        for slot, (tree, verified) in enumerate(zip(drafted, found, strict=True)):
            for node in {ROOT, len(tree) // 2 - 1, len(tree) - 1}:
                expected = plain_logits(model, contexts[slot] + tokens_to(tree, node))
                assert_same_logits(verified.logits[node + 1], expected)
            contexts[slot] += tokens_to(tree, len(tree) - 1)
            target.commit(cache, slot, path_to(tree, len(tree) - 1))
