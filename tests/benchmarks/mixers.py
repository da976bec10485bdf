"""Times the rows of a recurrent mixer at real sizes on a CPU: ``python -m tests.benchmarks.mixers``.

One mixer of each kind with random weights is timed inside a model that has little else. Prints median milliseconds for
trees of 1, 8 and 32 rows, in closed form and by levels, next to one token by transformers' code; all take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks import recurrences
from hdtool.runtime.engines.stock.recurrent_layers import described_mixers
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.target import Target

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-4B": (
        "qwen3_5_text",
        {
            "hidden_size": 2560,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Kimi-Linear": (
        "kimi_linear",
        {
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 2,
            "num_experts_per_token": 1,
            "moe_intermediate_size": 32,
            "linear_attn_config": {
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
                "kda_layers": [1],
                "full_attn_layers": [2],
            },
        },
    ),
    "Granite-4-H": (
        "granitemoehybrid",
        {
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 64,
        },
    ),
    "Nemotron-H-9B": (
        "nemotron_h",
        {
            "hidden_size": 4480,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
        },
    ),
    "LFM2-1.2B": (
        "lfm2",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}
ROWS, CONTEXT = (1, 8, 32), 64


class Clock:
    """Accumulates the seconds spent in calls of a module."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[None]:
        begun = [0.0]

        def begin(*_: object) -> None:
            begun[0] = time.perf_counter()

        def end(*_: object) -> None:
            self.seconds += time.perf_counter() - begun[0]

        handles = module.register_forward_pre_hook(begin), module.register_forward_hook(end)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", type=lambda names: names.split(","), default=list(SHAPES))
    options = parser.parse_args()
    print(machine(torch.device("cpu")))
    for name in options.shapes:
        print(f"{name:14}", "  ".join(measured(*SHAPES[name], options.rounds)), flush=True)


def measured(kind: str, shape: dict[str, Any], rounds: int) -> Iterator[str]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **shape})).eval()
    compile_linear_layers(model)
    target = Target(model)
    with patch.object(recurrences, "described_mixers", return_value={}):
        by_levels = Target(model)
    module = next(iter(described_mixers(model, target.facts.state_shapes).values())).module
    ids = [3 + place % 400 for place in range(CONTEXT)]
    used, clock = DynamicCache(config=target.config), Clock()
    forms = {"closed": (target, target.allocate()), "levels": (by_levels, by_levels.allocate())}
    for form, cache in forms.values():
        form.prefill(cache, 0, ids, room=200)
    found: dict[str, list[float]] = {}
    with clock.of(module), torch.inference_mode():
        model(input_ids=torch.tensor([ids]), **{target.stock.cache_name: used})
        for _ in range(rounds):
            clock.seconds = 0
            target.stock.forward([[5]], [[used.get_seq_length()]], None, used)
            found.setdefault("library, 1 row", []).append(clock.seconds)
            for name, (form, cache) in forms.items():
                for rows in ROWS:
                    clock.seconds = 0
                    form.verify(cache, [tree_of(rows - 1)])
                    found.setdefault(f"{name}, {rows}", []).append(clock.seconds)
    return (f"{name} {1e3 * median(times):.1f} ms" for name, times in found.items())


def tree_of(nodes: int) -> DraftTree:
    """Return a binary tree with ``nodes`` nodes."""
    return DraftTree.of(
        1, [(3 * node + 2) % 100 for node in range(nodes)], [(node + 1) // 2 - 1 for node in range(nodes)]
    )


if __name__ == "__main__":
    main()
