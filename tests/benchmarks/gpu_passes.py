"""Compares captured passes of small models with their ``forward``: ``python -m tests.benchmarks.gpu_passes``.

Verifies random trees after contexts of 5 to 700 tokens, in one slot and in three, and accepts a random path of each.
Prints the median and the maximum RMS distance of the logits at the end of a path, in standard deviations.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from hdtool.runtime.core.tolerances import distances
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.model.devices import use_planless_attention
from hdtool.runtime.target.target import Target, by_device
from tests.benchmarks.gpu_step import name_of
from tests.benchmarks.laboratory import parser_of
from tests.support.rehearsed import captured_of, direct
from tests.support.trees import path_to, tokens_to

VOCABULARY = 500
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 128},
    "Mistral": {"sliding_window": 100},
    "Exaone4": WINDOWS,
    "Gemma": {},
    "Gemma2": WINDOWS,
    "Gemma3Text": {**WINDOWS, "head_dim": 256},
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "use_qk_norm": True,
    },
    "GptOss": {**WINDOWS, **EXPERTS},
    "Granite": {"attention_multiplier": 0.1, "embedding_multiplier": 4.0, "residual_multiplier": 0.6},
    "Mixtral": EXPERTS,
    "Olmo2": {},
    "Olmo3": WINDOWS,
    "Olmoe": {**EXPERTS, "head_dim": 32},
    "Phi3": {"num_key_value_heads": 8, "partial_rotary_factor": 0.75},
    "Qwen2Moe": {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {**EXPERTS, "moe_intermediate_size": 64},
    "SmolLM3": {"no_rope_layers": [1, 1, 0, 1]},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "FalconH1": {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1},
    "Mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64},
    "Lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 8,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "time_step_min": 1e-9,  # which forward applies, and decoding doesn't
    },
}
"""Models with recurrent layers or short convolutions."""
FAMILIES |= RECURRENT
CONTEXTS, NODES, SLOTS, STEPS = (5, 130, 700), (0, 20, 64), (1, 3), 3


def main() -> None:
    parser = parser_of(__doc__, device="cuda", families=list(FAMILIES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args()
    device = torch.device(options.device)
    use_planless_attention(device)
    for name in options.families:
        changes = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SHAPE, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).to(device).eval()
        target = Target(model, by_device if device.type == "cuda" else direct)
        found = [one for slots in SLOTS for one in distances_of(target, model, slots, random.Random(slots))]
        passes = captured_of(target)._passes
        used = name_of(passes[0]) if passes else "not captured"
        print(f"{name:10} {used:24} median {median(found):.1e}, largest {max(found):.1e}", flush=True)


@torch.inference_mode()
def distances_of(target: Target, model: PreTrainedModel, slots: int, draw: random.Random) -> list[float]:
    cache, found = target.allocate(slots), []
    contexts = [[draw.randrange(VOCABULARY) for _ in range(draw.choice(CONTEXTS))] for _ in range(slots)]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context, room=300)
    for _ in range(STEPS):
        trees = [random_tree(draw) for _ in range(slots)]
        verified = target.verify(cache, trees)
        for slot, tree in enumerate(trees):
            node = draw.randrange(ROOT, len(tree))
            contexts[slot] += tokens_to(tree, node)
            ids: Any = torch.tensor([contexts[slot]], device=target.device)
            plain = model(input_ids=ids).logits[0, -1:]
            found.append(distances(verified[slot].logits[node + 1 :][:1], plain).item())
            target.commit(cache, slot, path_to(tree, node))
    return found


def random_tree(draw: random.Random) -> DraftTree:
    tokens = [draw.randrange(VOCABULARY) for _ in range(draw.choice(NODES))]
    parents = [draw.randrange(ROOT, node) if node else ROOT for node in range(len(tokens))]
    return DraftTree.of(draw.randrange(VOCABULARY), tokens, parents)


if __name__ == "__main__":
    main()
