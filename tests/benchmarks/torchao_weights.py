"""Times passes with torchao's int8 weights: by torchao's matmuls, and by hdtool's on packed weights.

    python -m tests.benchmarks.torchao_weights                      # random weights in the shape of Llama 3.2 1B
    python -m tests.benchmarks.torchao_weights --model FILE.gguf    # a model, rounded to bfloat16 first

The 16-bit checkpoint is quantized in the same way on loading for each side. All sides are measured in turn, in one
process with one thread; ratios are medians of ratios within a repetition. Times are CPU time, which equals wall-clock
time on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from hdtool.runtime.config.model import INT8, ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import load
from tests.benchmarks.cpu_weights import CONTEXT, ROWS, checkpoint
from tests.support.one_sequence import OneSequence

LIBRARY = "torchao"
SIDES: dict[str, dict[str, Any]] = {
    LIBRARY: {"dtype": "float32"},
    "packed, code of transformers": {"fused_layers": False},
    "packed, compiled code": {},
    "packed, compiled code, activations in 8 bits": {"activations": INT8},
}


def sequence_of(folder: str, options: dict[str, Any]) -> OneSequence:
    config = ModelConfig(folder, device="cpu", quantization="int8", **options)
    one = OneSequence(load(config).target)
    one.prefill(some_context(CONTEXT, 4000))
    return one


def times_of(sides: dict[str, OneSequence], rows: int, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of all passes but the first, by side."""
    tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, one in sides.items():
            started = time.process_time()
            one.verify(tree)
            taken[name].append((time.process_time() - started) * 1e3)
    return {name: times[1:] for name, times in taken.items()}


def passes(sides: dict[str, OneSequence], repeats: int) -> None:
    by_rows = [times_of(sides, rows, repeats) for rows in ROWS]
    for title, of_side in (("milliseconds of a pass", statistics.median), ("times as fast as torchao", None)):
        print(f"\n| {title}, rows | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
        for name in sides:
            cells = [
                f"{of_side(taken[name]):.1f}" if of_side else f"{_ratio(taken[LIBRARY], taken[name]):.2f}"
                for taken in by_rows
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file, or another model")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{machine(torch.device('cpu'))}; one thread", flush=True)
    with TemporaryDirectory() as folder:
        checkpoint(options.model, torch.bfloat16, Path(folder))
        passes({name: sequence_of(folder, side) for name, side in SIDES.items()}, options.repeats)


if __name__ == "__main__":
    main()
