"""Compares the compiled matmul with torch's: ``python -m tests.benchmarks.matmul [--threads N …]``.

Multiplies by the matrices of a decoder layer, with numbers of rows from one token to the largest prompt chunk. The
compiled matmul reads weights in float32, in 16 bits or in blocks; torch multiplies by the same weights in float32.
Several weights of a shape take turns, so that each is read from main memory. Both sides are measured in turn, and the
fastest time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from hdtool.runtime.kernels.compact_weight import Stored
from hdtool.runtime.kernels.gemm import matmul_of
from hdtool.runtime.kernels.linear import format_of
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_GGUF_TYPE
from hdtool.runtime.kernels.thread_pool import parallel_matmul, shared_thread_pool
from tests.support.packed_blocks import NAMES, some_matrix

Shape = tuple[int, int]
MODELS: dict[str, tuple[Shape, ...]] = {
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576), (576, 1536)),
    "Qwen2.5-1.5B": ((1536, 1536), (256, 1536), (8960, 1536), (1536, 8960)),
    "Qwen2.5-7B": ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944)),
}
"""Shapes of the query and output projections, of the key and value projections, and of the MLP."""
ROWS = (1, 4, 8, 16, 32, 64, PROMPT_CHUNK)
FORM_NAMES = ("float32", "bfloat16", "float16", *(one.name for one in FORMATS_BY_GGUF_TYPE.values()))
USUAL = ("float32", "bfloat16", "Q4_1", "Q8_0")
IN_TURN = 1 << 26
"""Total number of elements of the weights that take turns."""
REPEATS = 3


def weight_of(form: str, shape: Shape) -> Stored:
    """Return a random matrix in the given format."""
    if form in NAMES:
        return some_matrix(NAMES[form], *shape)
    return (torch.randn(shape) * 0.05).to(getattr(torch, form))


def seconds_of(matmul: Callable[[], object]) -> float:
    started = time.perf_counter()
    matmul()
    return time.perf_counter() - started


@torch.inference_mode()
def milliseconds(weights: Sequence[Stored], rows: int) -> tuple[float, float]:
    """Return the fastest time of one matmul by the compiled code and by torch."""
    threads, (outs, columns) = torch.get_num_threads(), weights[0].shape
    inputs, outputs = torch.randn(rows, columns), torch.empty(rows, outs)
    wide = [weight.float() for weight in weights]
    compiled = matmul_of(*format_of(weights[0]))
    given = outs, columns, inputs.data_ptr(), rows, outputs.data_ptr(), 0

    def ours() -> None:
        with shared_thread_pool(threads).open() as team:  # opened once per pass
            for weight in weights:
                parallel_matmul(team, threads, compiled.address, weight.data_ptr(), *given)

    def torchs() -> None:
        for weight in wide:
            linear(inputs, weight)

    best = [float("inf")] * 2
    for _ in range(REPEATS + 1):
        best = [min(least, seconds_of(side)) for least, side in zip(best, (ours, torchs), strict=True)]
    return 1e3 * best[0] / len(weights), 1e3 * best[1] / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORM_NAMES, default=list(USUAL))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    print(f"{machine()}\n\nMilliseconds of ours, and how many times as long torch's takes, by the number of rows:\n")
    print(f"| model | matrix | weights | threads | {' | '.join(map(str, options.rows))} |")
    print(f"|---|---|---|---|{'---|' * len(options.rows)}")
    for model in options.models:
        for shape in MODELS[model]:
            outs, columns = shape
            for form in options.forms:
                if form in NAMES and columns % NAMES[form].block_size:
                    continue  # columns are not a multiple of the block size
                weights = [weight_of(form, shape) for _ in range(max(1, min(4, IN_TURN // (outs * columns))))]
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    cells = [milliseconds(weights, rows) for rows in options.rows]
                    shown = " | ".join(f"{ours:.2f} ({torchs / ours:.2f})" for ours, torchs in cells)
                    print(f"| {model} | {outs} x {columns} | {form} | {threads} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
