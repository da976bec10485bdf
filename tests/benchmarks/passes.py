"""Times forward passes of one model: ``python -m tests.benchmarks.passes --model smollm2 [--activations int8]``.

Covers one token, trees and batches after 200 tokens, and prompts. To compare two versions, run it in both checkouts in
turn. With one thread, times are CPU time, which other processes disturb little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.target.load import load

CONTEXT, SLOTS = 200, 8
TREES, TREES_OF_A_BATCH, PROMPTS = (0, 8, 32, 64), (0, 7), (64, 512)
TURNS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--activations", choices=("float32", "int8"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    target = load(ModelConfig(options.model, device="cpu", activations=options.activations)).target
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter

    def milliseconds(compute: Callable[[], object], turns: int = TURNS) -> str:
        compute()
        seconds = []
        for _ in range(turns):
            started = clock()
            compute()
            seconds.append(clock() - started)
        return f"{1e3 * median(seconds):.2f}"

    one, several = target.allocate(1), target.allocate(SLOTS)
    context = some_context(CONTEXT, target.vocabulary)
    for cache in (one, several):
        for slot in range(len(cache.slots)):
            target.prefill(cache, slot, context, room=100)
    found = {}
    for nodes in TREES:
        tree = chain(nodes)
        found[f"tree of {nodes}"] = milliseconds(lambda tree=tree: target.verify(one, [tree]))  # type: ignore[misc]
    for nodes in TREES_OF_A_BATCH:
        trees = [chain(nodes)] * SLOTS
        found[f"batch of {SLOTS}, trees of {nodes}"] = milliseconds(lambda trees=trees: target.verify(several, trees))  # type: ignore[misc]
    for length in PROMPTS:
        prompt = some_context(length, target.vocabulary)
        found[f"prompt of {length}"] = milliseconds(lambda prompt=prompt: target.prefill(one, 0, prompt), TURNS // 3)  # type: ignore[misc]
    print(", ".join(f"{name}: {time_of} ms" for name, time_of in found.items()))


def chain(nodes: int) -> DraftTree:
    return DraftTree.of(1, list(range(5, 5 + nodes)), list(range(-1, nodes - 1)))


if __name__ == "__main__":
    main()
