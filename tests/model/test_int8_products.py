"""Products of packed weights with activations in 8 bits, beside the same numbers in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from numba import njit

from hdtool.runtime.kernels.int8_dot_products import ANY_PROCESSOR, PANEL_ROWS, PART, panel_format
from hdtool.runtime.kernels.int8_matmul import MAX_CHUNK_BYTES, Panels
from hdtool.runtime.kernels.int8_tiles import INT8_TILE_ROWS, RECORD_SIZE, panel_tile, quantize_row
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, BlockFormat, by_rows
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from tests.support.packed_blocks import (
    MAX_BLOCK_SIZE,
    SCALES,
    expected,
    int8_linear,
    needs_blocks,
    set_scales,
    some_matrix,
)
from tests.support.project import ROOT

pytestmark = needs_blocks
ALL = [pytest.param(one, id=one.name) for one in ALL_FORMATS]


def in_8_bits(numbers: torch.Tensor) -> torch.Tensor:
    """What is left of input rows in 8 bits, in float64: each part has the scale by which its largest number is 127."""
    parts = numbers.view(len(numbers), -1, PART)
    largest = parts.abs().amax(-1, keepdim=True)
    # Not ``127 / largest``, which torch computes as a product with the reciprocal.
    inverse = torch.where(largest > 1e-30, torch.full_like(largest, 127) / largest, 0)
    levels = (parts.double() * inverse.double()).round()
    return (levels * (largest / 127).double()).view(numbers.shape)


def assert_is_product(
    found: torch.Tensor, numbers: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None
) -> None:
    weights = torch.from_numpy(expected(matrix)).double()
    added = torch.zeros(len(weights)).double() if bias is None else bias.double()
    rounded = in_8_bits(numbers)
    exact, magnitude = rounded @ weights.T + added, rounded.abs() @ weights.abs().T + abs(added)
    # A minimum is added by itself: what is rounded can be larger than the weight that it is a part of.
    largest = weights.abs().amax() * rounded.abs().sum(1, keepdim=True)
    assert ((found - exact).abs() <= 8 * torch.finfo(torch.float32).eps * (magnitude + largest)).all()


@given(
    st.sampled_from(ALL_FORMATS),
    st.integers(1, 3 * INT8_TILE_ROWS),
    st.integers(1, 3 * PANEL_ROWS),
    st.integers(1, 10),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_products(format: BlockFormat, rows: int, outs: int, wholes: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    columns = wholes * max(COLUMN_MULTIPLE, format.block_size)
    matrix = some_matrix(format, outs, columns, seed)
    numbers, added = torch.randn(rows, columns), torch.randn(outs) if bias else None
    found = int8_linear(numbers, Panels(matrix.blocks, format), added)
    assert_is_product(found, numbers, matrix, added)
    for row in range(rows):
        alone = int8_linear(numbers[row : row + 1].contiguous(), Panels(matrix.blocks, format), added)
        assert torch.equal(alone[0], found[row]), "a row does not depend on the rows beside it"


@pytest.mark.parametrize("format", ALL)
@pytest.mark.one_in(3)
def test_panels_that_are_made_in_several_parts(format: BlockFormat) -> None:
    columns = 4 * MAX_BLOCK_SIZE
    matrix = some_matrix(format, 2 * MAX_CHUNK_BYTES // columns + 13, columns)
    numbers = torch.randn(2, columns)
    panels = Panels(matrix.blocks, format)
    assert panels.memory.nbytes <= 1.05 * matrix.nbytes + panel_format(format).bytes(columns)
    assert_is_product(int8_linear(numbers, panels), numbers, matrix, None)


@pytest.mark.parametrize("format", ALL)
def test_sums_never_overflow(format: BlockFormat) -> None:
    """Instructions that add in 16 bits saturate: all levels and inputs are as large as they can be."""
    blocks = torch.full((PANEL_ROWS, 2 * MAX_BLOCK_SIZE // format.block_size, format.bytes), 255, dtype=torch.uint8)
    if format.name in ("Q8_0", "int8"):
        blocks[:, :, format.bytes - format.block_size :] = 127
    if format.name == "MXFP4":
        blocks[:, :, 1:] = 0x77  # its largest number is not the last one
    flat = blocks.view(-1, format.bytes).numpy()
    for first in SCALES[format.name]:
        set_scales(flat, format, first, torch.ones(len(flat)).numpy())
    matrix = PackedMatrix(blocks.view(PANEL_ROWS, -1), format)
    for numbers in (torch.ones(5, matrix.shape[1]), -torch.ones(5, matrix.shape[1])):
        assert_is_product(int8_linear(numbers, Panels(matrix.blocks, format)), numbers, matrix, None)


@pytest.mark.parametrize("format", ALL)
def test_numbers_that_have_no_8_bits(format: BlockFormat) -> None:
    matrix = some_matrix(format, 9, MAX_BLOCK_SIZE)
    panels = Panels(matrix.blocks, format)
    for number in (float("inf"), -float("inf"), float("nan")):
        numbers = torch.ones(2, MAX_BLOCK_SIZE)
        numbers[0, 40] = number
        found = int8_linear(numbers, panels)
        assert found[0].isnan().all() and found[1].isfinite().all()
    for number in (0.0, -0.0, 1e-39, 1e-31):
        assert int8_linear(torch.full((1, MAX_BLOCK_SIZE), number), panels).abs().max() < 1e-25


FREED = """
import torch
from hdtool.runtime.kernels.int8_matmul import Panels
from tests.support.packed_blocks import NAMES, int8_linear, some_matrix

matrix = some_matrix(NAMES["Q8_0"], 16, 512)
int8_linear(torch.randn(400, 512), Panels(matrix.blocks, matrix.format))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the setting is one of glibc")
def test_no_memory_is_used_that_was_freed() -> None:
    """Large parts of memory are unmapped as soon as they are freed: whatever reads one ends the process."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr


def _tile(name: str, dot: str | None) -> object:
    tile = by_rows({1: panel_tile(1, dot)})

    @njit(nogil=True)
    def multiply(panel: int, columns: int, inputs: int, records: int, outputs: int) -> None:
        quantize_row(inputs, name, columns, records)
        tile(panel, name, columns, records, outputs, 0, 1)

    return multiply


VARIED = ("Q4_1", "Q5_0", "Q8_0", "Q6_K", "IQ4_NL", "MXFP4", "int8")
"""Formats that use all instructions between them."""


@pytest.mark.parametrize("format", [one for one in ALL if one.id in VARIED])
def test_any_processor_has_the_same_bits(format: BlockFormat) -> None:
    matrix, numbers = some_matrix(format, PANEL_ROWS, MAX_BLOCK_SIZE), torch.randn(1, MAX_BLOCK_SIZE)
    panels, records = (
        Panels(matrix.blocks, format),
        torch.empty(MAX_BLOCK_SIZE // PART * RECORD_SIZE, dtype=torch.uint8),
    )
    found = torch.empty(1, PANEL_ROWS)
    multiply: object = _tile(format.name, ANY_PROCESSOR)
    multiply(panels.data_ptr(), MAX_BLOCK_SIZE, numbers.data_ptr(), records.data_ptr(), found.data_ptr())  # type: ignore[operator]
    assert torch.equal(found, int8_linear(numbers, panels))
