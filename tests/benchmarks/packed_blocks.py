"""What a product with the packed weights of a GGUF file could reach: Q4_1 and Q8_0, expanded in registers.

    python -m tests.benchmarks.packed_blocks products
    python -m tests.benchmarks.packed_blocks passes --model FILE.gguf    # whose matrices are in these formats

A block of 32 weights becomes float32 numbers in registers, with the two roundings of the library that unpacks the file,
and is multiplied by float32 rows in the order of our own product. So the results have the bits of float32, which is
checked. Times are those of the one thread on the processor. It is an experiment: it needs AVX-512, and no command uses
it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hdtool.runtime.config import ModelConfig
from hdtool.runtime.environment import machine
from hdtool.runtime.kernels.raw_memory import BYTES, WORD
from hdtool.runtime.kernels.small_batch_gemm import CACHE_LINE, FLOAT, HALF, INDEX, LANES, LONG_ROW, OUTS
from hdtool.runtime.kernels.small_batch_linear import SmallBatchLinear, own_linear
from hdtool.runtime.model.load import load
from hdtool.runtime.model.target import Target, some_context
from hdtool.runtime.tree import DraftTree

VECTOR, WORDS, OCTETS = (ir.VectorType(kind, 16) for kind in (FLOAT, WORD, ir.IntType(8)))
BLOCK = 32
"""Weights of a block."""
Q4_1, Q8_0 = np.int8(0), np.uint8(0)
"""Arguments whose type states a format."""
FORMATS = {"Q4_1": (Q4_1, 20), "Q8_0": (Q8_0, 34)}
"""The bytes of a block: two float16 and 16 bytes of two weights each, or one float16 and 32 bytes."""
ROWS = (1, 2, 4, 8, 16, 32)
SHAPES = ((1536, 576), (576, 1536), (2048, 2048), (8192, 2048))
NUMBERS = 75_000_000
"""Weights of all layers of a shape together: more than the last cache holds."""
REPEATS = 7


class _PackedTile:
    """Generates the LLVM code of one tile."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self.builder = builder
        self.is_q4 = kind == types.int8
        self.bytes = 20 if self.is_q4 else 34

    def call(self, name: str, result: Any, *arguments: Any, **flags: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments, **flags)

    def load(self, address: Any, kind: Any, align: int) -> Any:
        found = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        found.align = align
        return found

    def spread(self, address: Any) -> Any:
        """A float16 in all lanes, as float32."""
        undefined = ir.Constant(VECTOR, ir.Undefined)
        number = self.builder.fpext(self.load(address, HALF, 2), FLOAT)
        first = self.builder.insert_element(undefined, number, WORD(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * 16))

    def weights(self, block: Any) -> list[Any]:
        """Both halves of a block in float32."""
        builder, scale = self.builder, self.spread(block)
        if self.is_q4:
            levels = ir.Constant(VECTOR, [float(level) for level in range(16)])
            table = builder.fadd(builder.fmul(levels, scale), self.spread(builder.gep(block, [INDEX(2)])))
            low = builder.zext(self.load(builder.gep(block, [INDEX(4)]), OCTETS, 1), WORDS)
            indices = low, builder.lshr(low, ir.Constant(WORDS, [4] * 16))
            # The permutation reads the four lowest bits of an index.
            return [self.call("llvm.x86.avx512.permvar.sf.512", VECTOR, table, index) for index in indices]
        parts = (self.load(builder.gep(block, [INDEX(first)]), OCTETS, 1) for first in (2, 18))
        return [builder.fmul(builder.sitofp(builder.sext(part, WORDS), VECTOR), scale) for part in parts]


def _tile(outs: int, rows: int, spread: int) -> Any:
    """An intrinsic for ``outs`` rows of a packed matrix; each sum has ``spread`` accumulators."""
    blocks = max(1, spread // 2)

    def typed(context: Any, matrix: Any, kind: Any, columns: Any, inputs: Any, outputs: Any, apart: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            matrix, _, columns, inputs, outputs, apart = arguments
            tile = _PackedTile(builder, kind)
            stride = builder.mul(builder.lshr(columns, INDEX(5)), INDEX(tile.bytes))
            first = builder.inttoptr(matrix, BYTES)
            packed = [builder.gep(first, [builder.mul(stride, INDEX(out))]) for out in range(outs + 1)]
            numbers = builder.inttoptr(inputs, FLOAT.as_pointer())
            read = [builder.gep(numbers, [builder.mul(columns, INDEX(row))]) for row in range(rows)]
            before, body = builder.block, builder.append_basic_block("columns")
            builder.branch(body)
            builder.position_at_end(body)
            column, sums = builder.phi(INDEX), [builder.phi(VECTOR) for _ in range(spread * outs * rows)]
            offset = builder.mul(builder.lshr(column, INDEX(5)), INDEX(tile.bytes))
            ahead = builder.gep(packed[outs], [builder.mul(offset, INDEX(outs))])
            for line in range(0, max(outs * blocks * tile.bytes, CACHE_LINE), CACHE_LINE):
                address = builder.gep(ahead, [INDEX(line)])
                tile.call("llvm.prefetch.p0", ir.VoidType(), address, WORD(0), WORD(2), WORD(1))
            added = list(sums)
            for block in range(blocks):
                factors = [
                    [tile.load(builder.gep(row, [builder.add(column, INDEX(32 * block + 16 * half))]), VECTOR, 4)]
                    for half in range(2)
                    for row in read
                ]
                for out in range(outs):
                    place = builder.gep(packed[out], [builder.add(offset, INDEX(block * tile.bytes))])
                    for half, weights in enumerate(tile.weights(place)):
                        for row in range(rows):
                            sum_ = ((2 * block + half) % spread * outs + out) * rows + row
                            (factor,) = factors[half * rows + row]
                            added[sum_] = tile.call("llvm.fmuladd.v16f32", VECTOR, weights, factor, added[sum_])
            following = builder.add(column, INDEX(BLOCK * blocks))
            zero = ir.Constant(VECTOR, [0.0] * 16)
            firsts = [INDEX(0), *[zero] * len(sums)]
            for phi, start, value in zip([column, *sums], firsts, [following, *added], strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(value, body)
            after = builder.append_basic_block("after")
            builder.cbranch(builder.icmp_signed("<", following, columns), body, after)
            builder.position_at_end(after)
            for sum_ in range(outs * rows, len(added)):
                added[sum_ % (outs * rows)] = builder.fadd(added[sum_ % (outs * rows)], added[sum_])
            written = builder.inttoptr(outputs, FLOAT.as_pointer())
            for out in range(outs):
                for row in range(rows):
                    name = "llvm.vector.reduce.fadd.v16f32"
                    total = tile.call(name, FLOAT, FLOAT(0.0), added[out * rows + row], fastmath=("reassoc",))
                    where = builder.add(builder.mul(apart, INDEX(row)), INDEX(out))
                    builder.store(total, builder.gep(written, [where]))
            return target.get_dummy_value()

        return types.void(types.int64, kind, *[types.int64] * 4), generate

    return intrinsic(typed)


_single, _alone = _tile(1, 1, 4), _tile(OUTS, 1, 4)
_one, _two, _four = (_tile(OUTS, rows, 1) for rows in (1, 2, 4))


@njit(nogil=True)
def _multiply(matrix: int, kind: Any, size: int, outs: int, columns: int, inputs: int, rows: int, outputs: int) -> None:
    stride = columns // 32 * size
    if rows == 1 and columns < LONG_ROW:
        for out in range(outs):
            _single(matrix + out * stride, kind, columns, inputs, outputs + out * 4, outs)
        return
    for out in range(0, outs, OUTS):
        tile, row = matrix + out * stride, 0
        while row < rows:
            read, written = inputs + row * columns * 4, outputs + (row * outs + out) * 4
            if rows == 1:
                _alone(tile, kind, columns, read, written, outs)
                row += 1
            elif rows - row >= 4:
                _four(tile, kind, columns, read, written, outs)
                row += 4
            elif rows - row >= 2:
                _two(tile, kind, columns, read, written, outs)
                row += 2
            else:
                _one(tile, kind, columns, read, written, outs)
                row += 1


def packed_linear(input: torch.Tensor, packed: torch.Tensor, kind: str) -> torch.Tensor:
    """The product with a matrix ``[outs, bytes]``; ``outs`` must be a multiple of ``OUTS``."""
    outs, columns = len(packed), input.shape[-1]
    rows = input.numel() // columns
    found = input.new_empty(rows, outs)
    _multiply(packed.data_ptr(), *FORMATS[kind], outs, columns, input.data_ptr(), rows, found.data_ptr())
    return found.view(*input.shape[:-1], outs)


def unpacked(packed: torch.Tensor, kind: str) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(np.ascontiguousarray(dequantize(packed.numpy(), GGMLQuantizationType[kind])))


def random_blocks(outs: int, columns: int, kind: str) -> torch.Tensor:
    size, scales = FORMATS[kind][1], 2 if kind == "Q4_1" else 1
    blocks = np.random.randint(0, 256, (outs * columns // BLOCK, size), dtype=np.uint8)
    numbers = (0.01 * np.random.rand(len(blocks), scales)).astype(np.float16)
    blocks[:, : 2 * scales] = numbers.view(np.uint8)
    return torch.from_numpy(blocks.reshape(outs, -1).copy())


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fastest(input: torch.Tensor, sides: dict[str, tuple[Product, list[torch.Tensor]]]) -> list[str]:
    """Milliseconds of the products with all matrices of each side, in turn."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(REPEATS):
        for name, (product, matrices) in sides.items():
            started = time.process_time()
            for matrix in matrices:
                product(input, matrix)
            best[name] = min(best[name], (time.process_time() - started) * 1e3)
    return [f"{found:.1f}" for found in best.values()]


def products() -> None:
    print("| shape | rows | float32 | bfloat16 | Q8_0 | Q4_1 | same bits |\n|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        number = NUMBERS // (shape[0] * shape[1])
        eight, four = ([random_blocks(*shape, kind) for _ in range(number)] for kind in ("Q8_0", "Q4_1"))
        wide = [unpacked(matrix, "Q4_1") for matrix in four]
        sides: dict[str, tuple[Product, list[torch.Tensor]]] = {
            "float32": (own_linear, wide),
            "bfloat16": (own_linear, [matrix.bfloat16() for matrix in wide]),
            "Q8_0": (partial(packed_linear, kind="Q8_0"), eight),
            "Q4_1": (partial(packed_linear, kind="Q4_1"), four),
        }
        for rows in ROWS:
            input = torch.randn(rows, shape[1])
            same = all(
                torch.equal(packed_linear(input, one, kind), own_linear(input, unpacked(one, kind)))
                for one, kind in ((eight[0], "Q8_0"), (four[0], "Q4_1"))
            )
            print(f"| {shape[0]} x {shape[1]} | {rows} | {' | '.join(fastest(input, sides))} | {same} |", flush=True)


def packed_weights(model: torch.nn.Module, file: str) -> dict[str, tuple[torch.Tensor, str]]:
    """The packed matrix of each linear layer, found by the rows of its numbers: some families permute them."""
    from gguf import GGUFReader

    rows: dict[bytes, tuple[int, int]] = {}
    tensors = [tensor for tensor in GGUFReader(file).tensors if tensor.tensor_type.name in FORMATS]
    blocks = [torch.from_numpy(np.array(tensor.data)) for tensor in tensors]
    for place, (tensor, packed) in enumerate(zip(tensors, blocks, strict=True)):
        for row, numbers in enumerate(unpacked(packed, tensor.tensor_type.name).numpy()):
            rows[numbers.tobytes()] = place, row
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SmallBatchLinear):
            places = [rows[numbers.tobytes()] for numbers in layer.weight.detach().numpy()]
            assert len({place for place, _ in places}) == 1
            place = places[0][0]
            found[name] = blocks[place][[row for _, row in places]].contiguous(), tensors[place].tensor_type.name
    return found


def no_product(input: torch.Tensor, outs: int) -> torch.Tensor:
    return input.new_zeros(*input.shape[:-1], outs)


def passes(file: str) -> None:
    wide, target, bare = (load(ModelConfig(file, device="cpu", dtype="float32")).target for _ in range(3))
    for name, (packed, kind) in packed_weights(target.model, file).items():
        layer: Any = target.model.get_submodule(name)
        layer.forward = partial(packed_linear, packed=packed, kind=kind)
        stock: Any = wide.model.get_submodule(name)
        stock.forward = partial(own_linear, weight=stock.weight)  # for all numbers of rows, as the packed one
        empty: Any = bare.model.get_submodule(name)
        empty.forward = partial(no_product, outs=len(packed))
    sides = {"float32": wide, "packed": target, "without products": bare}
    print(f"| milliseconds of a pass, rows | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
    times: dict[str, list[float]] = {side: [] for side in sides}
    same = True
    for rows in ROWS:
        found, equal = _times_of(sides, rows)
        same &= equal
        for side, seconds in found.items():
            times[side].append(seconds)
    for side, medians in times.items():
        print(f"| {side} | {' | '.join(f'{each:.1f}' for each in medians)} |")
    print(f"\nall logits of the first two have the same bits: {same}")


def _times_of(sides: dict[str, Target], rows: int) -> tuple[dict[str, float], bool]:
    tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
    taken: dict[str, list[float]] = {side: [] for side in sides}
    logits = []
    for target in sides.values():
        target.prefill(some_context(64, 4000))
        target.commit([])
        logits.append(target.verify(tree).clone())
    for _ in range(3 * REPEATS):
        for side, target in sides.items():
            started = time.process_time()
            target.verify(tree)
            taken[side].append((time.process_time() - started) * 1e3)
    return {side: statistics.median(each) for side, each in taken.items()}, torch.equal(*logits[:2])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "passes"))
    parser.add_argument("--model", help="a GGUF file")
    options = parser.parse_args()
    if LANES < 16:
        parser.exit(1, "this experiment needs AVX-512\n")
    torch.set_num_threads(1)
    print(machine(torch.device("cpu")) + ", one thread\n")
    if options.part == "products":
        products()
    elif options.model:
        passes(options.model)
    else:
        parser.error("passes needs --model FILE.gguf")


if __name__ == "__main__":
    main()
