"""Times forward passes of hybrid models of about a billion weights, compiled and by transformers' modules.

``python -m tests.benchmarks.hybrid_passes [--shapes lfm2] [--threads 1]``: random weights in bfloat16. Passes cover a
single token and trees of 7 and 31 nodes after 200 tokens, each with the commit of its root, and a prompt. Both sides
take turns, and medians are printed. With one thread, times are CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.target.target import Target

COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "qwen3_5_text": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "granitemoehybrid": {
        "hidden_size": 1536,
        "num_hidden_layers": 20,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "num_local_experts": 0,
        "shared_intermediate_size": 4096,
        "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(20)],
    },
}
CONTEXT, NODES, PROMPT = 200, (0, 7, 31), 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda names: names.split(","), default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine(torch.device("cpu")))
    for shape in options.shapes:
        print(f"{shape}:", measured(shape, options.rounds, options.threads), flush=True)


def measured(shape: str, rounds: int, threads: int) -> str:
    target, clock = target_of(shape), time.thread_time if threads == 1 else time.perf_counter
    target.compile()
    compiled = target.compiled
    assert compiled, "this shape is not compiled"
    context = some_context(CONTEXT, target.vocabulary)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for form, made in (("compiled", compiled), ("library's", None)):
            target.use_compiled(made)
            cache = target.allocate()
            target.prefill(cache, 0, context, room=400)

            def seconds(compute: Callable[[], object]) -> float:
                started = clock()
                compute()
                return clock() - started

            for nodes in NODES:
                tree = tree_of(nodes)

                def step(tree: Any = tree, cache: Any = cache) -> None:
                    target.verify(cache, [tree])
                    target.commit(cache, 0, [])

                step()
                found.setdefault(f"{form}, {nodes + 1} rows", []).append(median(seconds(step) for _ in range(3)))
            if number < 2:
                prompt = some_context(PROMPT, target.vocabulary)
                read = seconds(lambda prompt=prompt, cache=cache: target.prefill(cache, 0, prompt))  # type: ignore[misc]
                found.setdefault(f"{form}, prompt of {PROMPT}", []).append(read)
    return ", ".join(f"{name}: {1e3 * median(times):.1f} ms" for name, times in found.items())


def target_of(shape: str) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape, **COMMON, **SHAPES[shape])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    compact_weights(model)
    model.config.dtype = torch.float32
    compile_linear_layers(model)
    return Target(model)


def tree_of(nodes: int) -> DraftTree:
    """Return a binary tree with ``nodes`` nodes."""
    return DraftTree.of(
        1, [(3 * node + 2) % 100 for node in range(nodes)], [(node + 1) // 2 - 1 for node in range(nodes)]
    )


if __name__ == "__main__":
    main()
