"""Times the host work between two captured steps: greedy acceptance, tree input, KV moves and ranked sampling.

python -m tests.benchmarks.acceptance [--nodes 63] [--vocabulary 128256]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.model.pass_inputs import StepInput

PATH = [0, 2, 6]
TIMES = 3000
CPU = torch.device("cpu")


def microseconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(TIMES):
        started = time.perf_counter()
        run()
        found.append(1e6 * (time.perf_counter() - started))
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=63)
    parser.add_argument("--vocabulary", type=int, default=128256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = options.nodes + 1
    tree = DraftTree.of(1, range(2, 2 + options.nodes), [node // 2 - 1 for node in range(options.nodes)])
    logits = torch.randn(rows, options.vocabulary, generator=torch.Generator().manual_seed(0))
    for row, node in zip([0, *(node + 1 for node in PATH)], [*PATH, None], strict=True):
        logits[row, 1 if node is None else int(tree.tokens[node])] = 30.0
    argmax, step = logits.argmax(-1).numpy(), StepInput(CPU)
    best = logits.topk(51)
    known = Verified(
        logits, argmax=argmax, finite=np.ones_like(argmax), ranked=(best.indices.numpy(), best.values.numpy())
    )
    greedy = Sampler(SamplingConfig(), [1])
    sampled = Sampler(SamplingConfig(temperature=1.0, top_k=50), [1])
    print(machine(CPU))
    print(f"greedy acceptance: {microseconds(lambda: accept(tree, known, greedy, max_tokens=rows)):.1f} us")
    print(f"by rankings, top-k 50: {microseconds(lambda: accept(tree, known, sampled, max_tokens=rows)):.1f} us")
    print(f"input of the tree: {microseconds(lambda: step.fill(0, tree, rows, 100)):.1f} us")
    print(f"a move of the path: {microseconds(lambda: step.move(0, rows, 100, PATH)):.1f} us")


if __name__ == "__main__":
    main()
