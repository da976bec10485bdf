"""Matmuls that compiled code calls by their address."""

from __future__ import annotations

import pytest
import torch
from numba import njit

from hdtool.runtime.kernels.compiled import struct_at
from hdtool.runtime.kernels.int8_matmul import Panels, int8_matmul_of
from hdtool.runtime.kernels.linear_layers import compiled_linear
from hdtool.runtime.kernels.matmul import KERNELS, call_at, matmul_of
from hdtool.runtime.kernels.matrix_formats import GGUF_FORMATS, BlockFormat
from hdtool.runtime.kernels.thread_pool import ROW_MULTIPLE
from tests.support.packed_blocks import MAX_BLOCK_SIZE, int8_linear, needs_blocks, some_matrix

pytestmark = needs_blocks
OUTS, ROWS = ROW_MULTIPLE + 3, 7


@njit(nogil=True)
def called(kernels: int, matrix: int, inputs: int, outputs: int, bias: int, first: int, end: int) -> None:
    multiply = struct_at(kernels, KERNELS).multiply
    call_at(multiply, (kernels, matrix, OUTS, MAX_BLOCK_SIZE, inputs, ROWS, outputs, bias, first, end))


@pytest.mark.parametrize("bias", [None, torch.randn(OUTS)], ids=["without bias", "bias"])
@pytest.mark.parametrize("in_8_bits", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("format", [pytest.param(one, id=one.name) for one in GGUF_FORMATS])
def test_parts_of_a_matmul_are_the_whole(format: BlockFormat, in_8_bits: bool, bias: torch.Tensor | None) -> None:
    matrix, numbers = some_matrix(format, OUTS, MAX_BLOCK_SIZE), torch.randn(ROWS, MAX_BLOCK_SIZE)
    panels = Panels(matrix.blocks, format)
    expected = int8_linear(numbers, panels, bias) if in_8_bits else compiled_linear(numbers, matrix, bias)
    matmul = int8_matmul_of(format) if in_8_bits else matmul_of(format)
    weights, found = (panels if in_8_bits else matrix).data_ptr(), torch.empty(ROWS, OUTS)
    for first, end in ((0, ROW_MULTIPLE), (ROW_MULTIPLE, OUTS)):
        added = 0 if bias is None else bias.data_ptr()
        called(matmul.address, weights, numbers.data_ptr(), found.data_ptr(), added, first, end)
    assert torch.equal(found, expected)


def test_a_matmul_is_made_once() -> None:
    format = GGUF_FORMATS[0]
    assert matmul_of(format) is matmul_of(format)
