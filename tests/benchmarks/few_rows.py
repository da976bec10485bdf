"""Compares CPU matmuls of a few rows with torch's.

    python -m tests.benchmarks.few_rows products    # matmuls alone
    python -m tests.benchmarks.few_rows passes      # whole passes that verify trees after 200 tokens

Uses the demo model's matrices, which together fit the last-level cache, and 500 MB of matrices of a larger model, which
are read from memory. Passes run transformers' code with either kind of linear layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from hdtool.runtime.config import ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.kernels.linear import CompiledLinear, compile_linear_layers, compiled_linear
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.one_sequence import OneSequence

LAYER = ((256, 256), (128, 256), (128, 256), (256, 256), (1024, 256), (1024, 256), (256, 1024))
MODELS = {"in cache (28 MB)": LAYER * 6 + ((4096, 256),), "from memory (500 MB)": ((1024, 1024),) * 119}
PRODUCTS = {"torch": linear, "ours": compiled_linear}
ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 15
CONTEXT = 200


def milliseconds(weights: list[torch.Tensor], rows: int) -> dict[str, float]:
    """Return the best time of one pass over all weights for each matmul; both take turns."""
    inputs = {weight.shape[1]: torch.randn(1, rows, weight.shape[1]) for weight in weights}
    best = dict.fromkeys(PRODUCTS, float("inf"))
    for _ in range(REPEATS):
        for name, product in PRODUCTS.items():
            started = time.perf_counter()
            for weight in weights:
                product(inputs[weight.shape[1]], weight)
            best[name] = min(best[name], time.perf_counter() - started)
    return {name: seconds * 1e3 for name, seconds in best.items()}


def products(threads: Sequence[int]) -> None:
    print("| weights | threads | rows | torch, ms | ours, ms | ratio |\n|---|---|---|---|---|---|")
    for name, shapes in MODELS.items():
        weights = [torch.randn(shape) for shape in shapes]
        for count in threads:
            torch.set_num_threads(count)
            for rows in ROWS:
                best = milliseconds(weights, rows)
                ratio = best["torch"] / best["ours"]
                print(f"| {name} | {count} | {rows} | {best['torch']:.2f} | {best['ours']:.2f} | {ratio:.2f} |")


def passes(threads: Sequence[int]) -> None:
    print(f"| model | threads | rows | {' | '.join(map(str, ROWS))} |\n|---|---|---|{'---|' * len(ROWS)}")
    large = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=10, num_attention_heads=16
    )
    for name, model in (
        ("embedded, 28 MB", load(ModelConfig(device="cpu", dtype="float32")).target.model),
        ("Llama, 10 layers of 1,024, 500 MB", LlamaForCausalLM(large).eval()),
    ):
        compile_linear_layers(model)
        one = OneSequence(Target(model))
        one.prefill(some_context(CONTEXT, model.config.vocab_size))
        layers = [layer for layer in model.modules() if isinstance(layer, CompiledLinear)]
        for count in threads:
            torch.set_num_threads(count)
            best = {kind: [pass_of(one, layers, kind, rows) for rows in ROWS] for kind in (Linear, CompiledLinear)}
            for product, kind in (("torch", Linear), ("ours", CompiledLinear)):
                print(f"| {name} | {count} | {product} | {' | '.join(f'{found:.2f}' for found in best[kind])} |")


def pass_of(one: OneSequence, layers: Sequence[Linear], kind: type[Linear], rows: int) -> float:
    """Return the best time of one pass in milliseconds."""
    tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
    for layer in layers:
        layer.__class__ = kind
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        one.verify(tree)
        best = min(best, time.perf_counter() - started)
    return best * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "passes"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(machine() + "\n")
    (products if options.part == "products" else passes)(options.threads)


if __name__ == "__main__":
    main()
