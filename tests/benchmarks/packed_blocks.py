"""Times matmuls with weights in the blocks of GGUF files against float32 and bfloat16.

    python -m tests.benchmarks.packed_blocks

Prints the fastest CPU milliseconds on one thread for 75 million weights in layers of one shape; formats take turns.
Results with packed and with unpacked weights are compared bit for bit.
"""

from __future__ import annotations

import time

import torch

from hdtool.runtime.kernels.gemm_tiles import unpack_matrix
from hdtool.runtime.kernels.linear_layers import multiply
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.kernels.matmul import matmul_of
from hdtool.runtime.kernels.matrix_formats import BFLOAT16, FLOAT32, GGUF_FORMATS, BlockFormat
from tests.benchmarks.laboratory import Table, parser_of
from tests.support.packed_blocks import some_matrix

ROWS = (1, 2, 4, 8, 16, 32)
SHAPES = ((1536, 576), (576, 1536), (2048, 2048), (8192, 2048))
"""Shapes of SmolLM2-135M and of a Llama of 1.2 billion weights. Blocks of 256 need a multiple of 256 columns."""
VALUES_PER_SIDE = 75_000_000
"""Total number of weights per shape, more than the last-level cache holds."""
Side = tuple[BlockFormat, list[torch.Tensor]]
"""Format, and the matrices."""


def product(input: torch.Tensor, format: BlockFormat, matrix: torch.Tensor) -> torch.Tensor:
    shape = torch.Size((len(matrix), input.shape[1]))
    return multiply(matmul_of(format).address, matrix.data_ptr(), shape, input)


def unpacked(blocks: torch.Tensor, columns: int, format: BlockFormat) -> torch.Tensor:
    found = torch.empty(len(blocks), columns)
    unpack_matrix(format, blocks.data_ptr(), len(blocks), columns, found.data_ptr())
    return found


def sides_of(shape: tuple[int, int], number: int) -> dict[str, Side]:
    numbers = [torch.randn(shape) for _ in range(number)]
    sides: dict[str, Side] = {
        "float32": (FLOAT32, numbers),
        "bfloat16": (BFLOAT16, [matrix.bfloat16() for matrix in numbers]),
    }
    for one in GGUF_FORMATS:
        if shape[1] % one.block_size == 0:
            sides[one.name] = one, [some_matrix(one, *shape, seed).blocks for seed in range(number)]
    return sides


def is_same(input: torch.Tensor, sides: dict[str, Side]) -> bool:
    return all(
        torch.equal(
            product(input, one, matrices[0]),
            product(input, FLOAT32, unpacked(matrices[0], input.shape[1], one)),
        )
        for one in GGUF_FORMATS
        if one.name in sides
        for _, matrices in [sides[one.name]]
    )


def fastest(input: torch.Tensor, sides: dict[str, Side], repeats: int) -> dict[str, float]:
    """Return the milliseconds of the matmuls with all matrices of each side; sides take turns."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, (format, matrices) in sides.items():
            started = time.process_time()
            for matrix in matrices:
                product(input, format, matrix)
            best[name] = min(best[name], (time.process_time() - started) * 1e3)
    return best


@torch.inference_mode()
def main() -> None:
    options = parser_of(__doc__, repeats=7).parse_args()
    torch.set_num_threads(1)
    names = ["float32", "bfloat16", *(one.name for one in GGUF_FORMATS)]
    print(machine(torch.device("cpu")) + ", one thread\n")
    table = Table("shape", "rows", *names, "same bits")
    for shape in SHAPES:
        sides = sides_of(shape, VALUES_PER_SIDE // (shape[0] * shape[1]))
        for rows in ROWS:
            input = torch.randn(rows, shape[1])
            best, same = fastest(input, sides, options.repeats), is_same(input, sides)
            cells = [f"{best[name]:.1f}" if name in best else "" for name in names]
            table.row(f"{shape[0]} x {shape[1]}", rows, *cells, same)


if __name__ == "__main__":
    main()
