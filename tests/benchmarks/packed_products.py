"""Compares one matmul with packed weights by hdtool, torch and ggml, by the number of rows.

    python -m tests.benchmarks.packed_products                # the larger matrices of SmolLM2 and of Llama 3.2 1B
    python -m tests.benchmarks.packed_products --rows 1 8

Each side multiplies the same rows by several random matrices in turn, so that no matrix is cached when it is read. All
sides take turns in one process with one thread. The deviation is the maximum error against the same weights multiplied
in float64, relative to the RMS of the result. ggml comes from ``llama-cpp-python``, if it is installed, and computes a
graph with one ``ggml_mul_mat``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch.nn.functional import linear

from hdtool.runtime.engines.cpu.int8_panels import Panels
from hdtool.runtime.kernels.linear import compiled_linear
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.kernels.packed_matrix import PackedMatrix, packed_int4, packed_int8
from tests.support.packed_blocks import NAMES, int8_linear

SHAPES = ((1536, 576), (8192, 2048))
MATRICES = 4
GROUP = 64
"""Columns per scale, for weights of torchao."""
ROWS = (1, 2, 4, 8, 16, 32)

Product = Callable[[torch.Tensor], torch.Tensor]


class Side(NamedTuple):
    """Matmuls with several matrices, and the dequantized first matrix for computing the deviation."""

    products: Sequence[Product]
    matrix: torch.Tensor


def sides_of(weights: list[torch.Tensor]) -> dict[str, Side]:
    found = {"float32, torch": Side([partial(linear, weight=weight) for weight in weights], weights[0])}
    for name in ("Q8_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"):
        kind = GGMLQuantizationType[name]
        blocks = [quantize(weight.numpy(), kind) for weight in weights]
        expanded = torch.from_numpy(dequantize(blocks[0], kind))
        packed = [PackedMatrix(torch.from_numpy(one), NAMES[name]) for one in blocks]
        found |= own_sides(name, packed, expanded)
        if GGML:
            found[f"{name}, ggml"] = Side([Ggml(one, int(kind), weights[0].shape) for one in blocks], expanded)
    return found | int8_sides(weights) | int4_sides(weights)


def own_sides(name: str, packed: list[PackedMatrix], expanded: torch.Tensor) -> dict[str, Side]:
    panels = [Panels(one.blocks, one.format) for one in packed]
    return {
        f"{name}, hdtool": Side([partial(compiled_linear, weight=weight) for weight in packed], expanded),
        f"{name}, hdtool, int8 activations": Side([partial(int8_linear, panels=one) for one in panels], expanded),
    }


def int8_sides(weights: list[torch.Tensor]) -> dict[str, Side]:
    scales = [weight.abs().amax(1) / 127 for weight in weights]
    levels = [(weight / scale[:, None]).round().to(torch.int8) for weight, scale in zip(weights, scales, strict=True)]
    expanded = levels[0] * scales[0][:, None]
    columns = weights[0].shape[1]
    packed = [packed_int8(one, scale[:, None], columns) for one, scale in zip(levels, scales, strict=True)]
    product = torch.ops.aten._weight_int8pack_mm
    pairs = list(zip(levels, scales, strict=True))
    found = own_sides("int8", [one for one in packed if one], expanded)
    for dtype in (torch.bfloat16, torch.float32):
        products = [partial(rounded, product=product, dtype=dtype, weight=(w, s.to(dtype))) for w, s in pairs]
        found[f"int8, torch in {str(dtype).removeprefix('torch.')}"] = Side(products, expanded)
    return found


def int4_sides(weights: list[torch.Tensor]) -> dict[str, Side]:
    """Return sides whose weights are levels from 0 to 15, with a scale and an offset per group of columns."""
    outs, columns = weights[0].shape
    found: dict[str, Side] = {}
    levels, scales = [], []
    for weight in weights:
        groups = weight.view(outs, -1, GROUP)
        scale = groups.abs().amax(2).bfloat16() / 7
        levels.append(((groups / scale.float()[..., None]).round() + 8).clamp(0, 15).int().view(outs, columns))
        scales.append(scale)
    expanded = ((levels[0].view(outs, -1, GROUP) - 8) * scales[0].float()[..., None]).view(outs, columns)
    packed = []
    for level, scale in zip(levels, scales, strict=True):
        signed = (level ^ 8).to(torch.uint8)
        packed.append(packed_int4(signed[:, ::2] | signed[:, 1::2] << 4, scale, torch.zeros_like(scale), GROUP))
    found |= own_sides("int4", [one for one in packed if one], expanded)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    theirs = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(level, 2) for level in levels]
    added = [torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).contiguous() for scale in scales]
    for dtype in (torch.bfloat16, torch.float32):
        pairs = list(zip(theirs, added, strict=True))
        products = [partial(rounded, product=product, dtype=dtype, weight=(w, GROUP, s.to(dtype))) for w, s in pairs]
        found[f"int4, torch in {str(dtype).removeprefix('torch.')}"] = Side(products, expanded)
    return found


def rounded(
    x: torch.Tensor, product: Callable[..., torch.Tensor], dtype: torch.dtype, weight: tuple[Any, ...]
) -> torch.Tensor:
    """Return torch's matmul of rows that are first rounded to ``dtype``."""
    return product(x.to(dtype), *weight).float()


class _Memory(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Library:
    """Functions of ggml that a graph with one matmul needs."""

    def __init__(self, folder: Path) -> None:
        base, cpu = (ctypes.CDLL(str(folder / f"libggml-{part}.so")) for part in ("base", "cpu"))
        pointer = ctypes.c_void_p
        for library, name, takes, gives in (
            (base, "ggml_init", [_Memory], pointer),
            (base, "ggml_free", [pointer], None),
            (base, "ggml_new_tensor_2d", [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], pointer),
            (base, "ggml_get_data", [pointer], pointer),
            (base, "ggml_mul_mat", [pointer, pointer, pointer], pointer),
            (base, "ggml_new_graph", [pointer], pointer),
            (base, "ggml_build_forward_expand", [pointer, pointer], None),
            (cpu, "ggml_graph_compute_with_ctx", [pointer, pointer, ctypes.c_int], ctypes.c_int),
            (cpu, "ggml_cpu_init", [], None),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = takes, gives
            setattr(self, name, function)
        cpu.ggml_cpu_init()

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)


def _ggml() -> _Library | None:
    found = find_spec("llama_cpp")
    return _Library(Path(found.origin).parent / "lib") if found and found.origin else None


GGML = _ggml()
WORK = 32 << 20
"""Bytes of a ggml context besides its tensors; each computation uses some."""


class Ggml:
    """Matmul by ggml with one matrix; builds a graph for each number of rows."""

    def __init__(self, blocks: npt.NDArray[np.uint8], kind: int, shape: tuple[int, ...]) -> None:
        self._blocks, self._kind, self._shape = blocks, kind, shape
        self._context = self._graph = self._input = self._output = self._rows = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != self._rows:
            self._build(len(x))
        assert GGML
        ctypes.memmove(self._input, x.data_ptr(), x.nbytes)
        assert GGML.ggml_graph_compute_with_ctx(self._context, self._graph, 1) == 0
        found = torch.empty(len(x), self._shape[0])
        ctypes.memmove(found.data_ptr(), self._output, found.nbytes)
        return found

    def _build(self, rows: int) -> None:
        assert GGML
        if self._context:
            GGML.ggml_free(self._context)
        outs, columns = self._shape
        size = self._blocks.nbytes + 4 * rows * (outs + columns) + WORK
        self._context = GGML.ggml_init(_Memory(size, None, False))
        weight = GGML.ggml_new_tensor_2d(self._context, self._kind, columns, outs)
        ctypes.memmove(GGML.ggml_get_data(weight), self._blocks.ctypes.data, self._blocks.nbytes)
        input = GGML.ggml_new_tensor_2d(self._context, 0, columns, rows)
        output = GGML.ggml_mul_mat(self._context, weight, input)
        self._graph = GGML.ggml_new_graph(self._context)
        GGML.ggml_build_forward_expand(self._graph, output)
        self._input, self._output = GGML.ggml_get_data(input), GGML.ggml_get_data(output)
        self._rows = rows


def deviation(side: Side, x: torch.Tensor) -> float:
    expected = x.double() @ side.matrix.double().t()
    return float((side.products[0](x).double() - expected).abs().max() / expected.square().mean().sqrt())


def milliseconds(sides: dict[str, Side], x: torch.Tensor, repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            started = time.process_time()
            for product in side.products:
                product(x)
            taken[name].append((time.process_time() - started) * 1e3 / len(side.products))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    print(f"{machine()}; 1 thread, medians of {options.repeats}")
    for outs, columns in SHAPES:
        sides = sides_of([torch.randn(outs, columns) * 0.02 for _ in range(MATRICES)])
        inputs = [torch.randn(rows, columns) for rows in options.rows]
        by_rows = [milliseconds(sides, x, options.repeats) for x in inputs]
        print(f"\n| {outs:,} by {columns:,}: milliseconds, rows | {' | '.join(map(str, options.rows))} | deviation |")
        print(f"|---|{'---|' * (len(options.rows) + 1)}")
        for name, side in sides.items():
            cells = " | ".join(f"{taken[name]:.3f}" for taken in by_rows)
            print(f"| {name} | {cells} | {max(deviation(side, x) for x in inputs):.0e} |", flush=True)


if __name__ == "__main__":
    main()
