"""Times compiled passes of several model families against transformers: ``python -m tests.benchmarks.cpu_families``.

Models have random bfloat16 weights in the shapes of small models with fewer layers. Both sides compute in float32 on
one thread and take turns in one process; times are CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.experts import compile_experts
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.target.target import Target
from tests.support.one_sequence import OneSequence

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
SHAPE: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000, **HEADS}
DENSE: dict[str, Any] = {**SHAPE, "intermediate_size": 3072}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": DENSE,
    "Gemma2": DENSE,
    "Gemma3": {
        "hidden_size": 640, "num_hidden_layers": 18, "vocab_size": 262144, "intermediate_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    },
    "Gemma4": {
        "hidden_size": 1536, "num_hidden_layers": 10, "vocab_size": 32000, "vocab_size_per_layer_input": 32000,
        "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "layer_types": 2 * [*["sliding_attention"] * 4, "full_attention"], "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
    },
    "Gemma4, experts": {
        "hidden_size": 1408, "num_hidden_layers": 6, "vocab_size": 32000, "hidden_size_per_layer_input": 0,
        "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
        "enable_moe_block": True, "num_experts": 32, "top_k_experts": 4, "moe_intermediate_size": 384,
    },
    "Granite": {key: value for key, value in DENSE.items() if key != "head_dim"},
    "Olmo2": {key: value for key, value in DENSE.items() if key != "head_dim"},
    "Phi3": {**{key: value for key, value in DENSE.items() if key != "head_dim"}, "pad_token_id": 0},
    "SmolLM3": {**{key: value for key, value in DENSE.items() if key != "head_dim"}, "pad_token_id": 0},
    "Qwen3Moe": {**SHAPE, **EXPERTS},
    "Qwen2Moe": {**DENSE, **EXPERTS, "shared_expert_intermediate_size": 1024},
    "Glm4Moe": {**DENSE, **EXPERTS, "n_routed_experts": 32, "first_k_dense_replace": 1, "pad_token_id": 0},
    "GptOss": {**SHAPE, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4},
    "GraniteMoe": {
        **{key: value for key, value in SHAPE.items() if key != "head_dim"},
        "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "Lfm2Moe": {
        **SHAPE, **EXPERTS, "intermediate_size": 3072, "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "Qwen3Next": {
        **DENSE, **EXPERTS, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 2,
    },
    "Qwen3_5Moe": {
        **SHAPE, **EXPERTS, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 2,
    },
}  # fmt: skip
"""Shapes by class name. Gemma 3 is the model of 270 million weights. Gemma 4 has layers as wide as those of E2B, or
half as wide as those of 26B-A4B with a quarter of its experts."""
OF_SEVERAL_MEDIA = ("Gemma3", "Gemma4", "Qwen3_5Moe")
ROWS = (1, 8)
PROMPT = [place * 7919 % 20000 for place in range(256)]
TREES = {rows: DraftTree.of(5, list(range(10, 9 + rows)), list(range(-1, rows - 2))) for rows in ROWS}


def library(model: Any) -> Target:
    return Target(model.float())


def compiled(model: Any) -> Target:
    compact_weights(model)
    compile_linear_layers(model)
    compile_experts(model)
    target = Target(model)
    target.compile()
    assert target.compiled
    return target


SIDES: dict[str, Callable[[Any], Target]] = {"library": library, "compiled": compiled}


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    kind = name.split(",")[0]
    settings = getattr(transformers, f"{kind}TextConfig" if kind in OF_SEVERAL_MEDIA else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(settings(**SHAPES[name]))
    model.generation_config.eos_token_id = None
    return model.bfloat16().eval()


def compare(name: str, repeats: int) -> str:
    sides = {side: OneSequence(make(random_model(name))) for side, make in SIDES.items()}
    seconds = defaultdict[tuple[str, int], list[float]](list)
    for _ in range(repeats):
        for side, one in sides.items():
            seconds[side, 0].append(timed(lambda one=one: one.prefill(PROMPT, room=64)))  # type: ignore[misc]
            for rows, tree in TREES.items():
                seconds[side, rows].append(timed(lambda one=one, tree=tree: one.verify(tree)))  # type: ignore[misc]
    cells = [name]
    for rows in (*ROWS, 0):
        usual, own = (median(seconds[side, rows]) for side in SIDES)
        cells.append(f"{1e3 * usual:.1f} | {1e3 * own:.1f} | {usual / own:.2f}")
    return f"| {' | '.join(cells)} |"


def timed(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, one thread; milliseconds of passes after {len(PROMPT)} tokens, and of reading these\n")
    sides = " | ".join(f"{what}: library | compiled | ratio" for what in ("1 row", "8 rows", "prompt"))
    print(f"| | {sides} |\n|{'---|' * 10}")
    for name in options.families:
        print(compare(name, options.repeats), flush=True)


if __name__ == "__main__":
    main()
