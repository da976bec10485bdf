"""What the rule of matmuls loses: ``python -m tests.benchmarks.matmul_rule [--threads N …]``.

All matmuls of a layer, for numbers of rows from one token to a piece of a prompt, by our own kernel and by torch's. The
rule is compared with the faster one of each shape, and with a race that leaves our own only where torch's takes less
than 0.8 of its time, since rows of our own have the same bits alone and beside others. Weights in 16 bits and in blocks
are expanded for torch's matmul, block by block. Each weight is read from main memory: several layers take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from hdtool.runtime.environment import machine
from hdtool.runtime.kernels.compact_weight import Stored
from hdtool.runtime.kernels.expanded_linear import BlockwiseLinear
from hdtool.runtime.kernels.matmul_rule import uses_own_matmul
from hdtool.runtime.kernels.packed.formats import FORMATS
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.kernels.matmul_address import product_of
from hdtool.runtime.kernels.small_batch_linear import form_of
from hdtool.runtime.kernels.team import multiply_together, team_of

MODELS = {
    "SmolLM2-135M": [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)],
    "Qwen2.5-1.5B": [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960)],
    "Qwen2.5-7B": [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)],
}
"""The matrices of a decoder layer."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
FORM_NAMES = ("float32", "bfloat16", "Q4_1", "Q8_0")
IN_TURN = 1 << 26
"""Numbers of the layers that take turns."""
CLEARLY_SLOWER = 1.25


def weight_of(form: str, shape: tuple[int, int]) -> Stored:
    """A matrix in some form; blocks of zeros take as long as others."""
    if form in ("float32", "bfloat16"):
        return (torch.randn(shape) * 0.05).to(getattr(torch, form))
    format = next(one for one in FORMATS.values() if one.name == form)
    return PackedMatrix(torch.zeros((shape[0], format.row_bytes(shape[1])), dtype=torch.uint8), format)


Matmul = Callable[[torch.Tensor, Any], object]


def seconds_of(matmul: Matmul, inputs: torch.Tensor, weights: Sequence[Stored]) -> float:
    """The shortest time of one matmul."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for weight in weights:
            matmul(inputs, weight)
        best = min(best, (time.perf_counter() - started) / len(weights))
    return best


def own_seconds(inputs: torch.Tensor, weights: Sequence[Stored]) -> float:
    """The shortest time of one matmul by our own kernel, whose threads are awake: a pass wakes them once."""
    threads, (outs, columns) = torch.get_num_threads(), weights[0].shape
    output = torch.empty(len(inputs), outs)
    with team_of(threads).open() as team:

        def matmul(inputs: torch.Tensor, weight: Any) -> None:
            matrix = product_of(*form_of(weight)).address, weight.data_ptr(), outs, columns
            multiply_together(team, threads, *matrix, inputs.data_ptr(), len(inputs), output.data_ptr(), 0)

        return seconds_of(matmul, inputs, weights)


@torch.inference_mode()
def row_of(form: str, shapes: Sequence[tuple[int, int]], rows: int) -> str:
    by_rule = by_race = by_faster = own_alone = 0.0
    for shape in shapes:
        weights = [weight_of(form, shape) for _ in range(max(1, min(4, IN_TURN // (shape[0] * shape[1]))))]
        inputs = torch.randn(rows, shape[1])
        own = own_seconds(inputs, weights)
        torchs = seconds_of(linear if form == "float32" else BlockwiseLinear(), inputs, weights)
        by_rule += own if uses_own_matmul(rows, shape[1]) else torchs
        by_race += own if own < CLEARLY_SLOWER * torchs else torchs
        by_faster += min(own, torchs)
        own_alone += own
    against = (by_race, by_faster)
    return (
        f"{1e3 * by_rule:.2f} | {' | '.join(f'{by_rule / other:.2f}' for other in against)} | {own_alone / by_rule:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORM_NAMES, default=list(FORM_NAMES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    print(f"{machine()}\n")
    print("| layer of | weights | threads | rows | ms by the rule | to the race | to the faster | own alone |")
    print("|---|---|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for model in options.models:
            for form in options.forms:
                for rows in options.rows:
                    cells = row_of(form, MODELS[model], rows)
                    print(f"| {model} | {form} | {threads} | {rows} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
