"""Packed weights rearranged to panels.

A row has the same bits alone and beside others, as each has its own scales and sums.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import cfunc, njit, types

from hdtool.runtime.engines.cpu.int8_code import PANEL_ROWS, PART, QUAD, PanelFormat, panel_format
from hdtool.runtime.engines.cpu.int8_tiles import INT8_TILE_ROWS, RECORD, panel_bytes, panel_tile, quantize_row
from hdtool.runtime.kernels.compiled import array_at
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS, add_bias
from hdtool.runtime.kernels.matrix_kind import MatrixKind, by_rows
from hdtool.runtime.kernels.packed_formats import BlockFormat
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

_tile = by_rows({rows: panel_tile(rows) for rows in range(1, INT8_TILE_ROWS + 1)})


@cache
def int8_matmul_of(kind: MatrixKind) -> Any:
    """The matmul for the panels of a format as a C function; it must be kept as long as its address is used."""

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def matmul(
        matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int, first: int, end: int
    ) -> None:
        part = matrix + first // PANEL_ROWS * panel_bytes(kind, columns)
        multiply_int8(part, kind, end - first, columns, inputs, rows, outputs + first * ITEM_SIZE, outs)
        add_bias(bias, outs, rows, outputs, first, end)

    return matmul


@njit(cache=True, nogil=True)
def multiply_int8(
    panels: int,
    kind: Any,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
) -> None:
    """All arrays are given by addresses; ``kind`` is the format that the panels were made from.

    The outputs of input rows are ``apart`` numbers from each other.
    """
    # An argument of the function that uses its address: numba frees an array after the last line that names it.
    records = np.empty(rows * (columns // PART * RECORD), np.uint8)
    _multiply_records(panels, kind, outs, columns, inputs, rows, outputs, apart, records)


@njit(cache=True, nogil=True)
def _multiply_records(
    panels: int,
    kind: Any,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
    records: npt.NDArray[np.uint8],
) -> None:
    """The same with memory for the rows in 8 bits."""
    width, size = columns // PART * RECORD, panel_bytes(kind, columns)
    quantized = records.ctypes.data
    for row in range(rows):
        quantize_row(inputs + row * columns * ITEM_SIZE, kind, columns, quantized + row * width)
    whole = outs // PANEL_ROWS * PANEL_ROWS
    for out in range(0, whole, PANEL_ROWS):
        panel = panels + out // PANEL_ROWS * size
        _multiply_panel(panel, kind, columns, quantized, width, rows, outputs + out * ITEM_SIZE, apart)
    if whole < outs:
        last = np.empty((rows, PANEL_ROWS), np.float32)
        panel = panels + whole // PANEL_ROWS * size
        _multiply_panel(panel, kind, columns, quantized, width, rows, last.ctypes.data, last.shape[1])
        for row in range(rows):
            array_at(outputs + row * apart * ITEM_SIZE, (outs,), types.float32)[whole:] = last[row, : outs - whole]


@njit(cache=True, nogil=True)
def _multiply_panel(
    panel: int, kind: Any, columns: int, inputs: int, width: int, rows: int, outputs: int, apart: int
) -> None:
    """Multiply a panel by all rows; the outputs of rows are ``apart`` numbers from each other."""
    row = 0
    while row < rows:
        some = min(rows - row, INT8_TILE_ROWS)
        _tile(panel, kind, columns, inputs + row * width, outputs + row * apart * ITEM_SIZE, apart, some)
        row += some


Bytes = npt.NDArray[Any]
"""Of uint8."""
TOGETHER = 1 << 20
"""Bytes of blocks that are rearranged at a time: all that is made from them stays in the cache."""


class Panels:
    """The panels of a matrix, in memory of their own."""

    def __init__(self, blocks: torch.Tensor, format: BlockFormat) -> None:
        """``blocks`` has the bytes of a matrix row in each row."""
        self.format = format
        self.shape = torch.Size((len(blocks), blocks.shape[1] // format.bytes * format.numbers))
        outs, columns = self.shape
        form = panel_format(format)
        count = -(-outs // PANEL_ROWS)
        self.matmul = int8_matmul_of(format.kind).address
        self.memory = torch.empty(count, form.bytes(columns), dtype=torch.uint8)
        rows, written = blocks.numpy().reshape(outs, -1, format.bytes), self.memory.numpy()
        step = max(1, TOGETHER // (PANEL_ROWS * blocks.shape[1]))

        def rearrange(first: int) -> None:
            some = _whole_panels(rows[first * PANEL_ROWS : (first + step) * PANEL_ROWS])
            _write(some, form, format.name, written[first : first + step])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy computes without the lock of Python
            list(pool.map(rearrange, range(0, count, step)))

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def _whole_panels(rows: Bytes) -> Bytes:
    """With rows of zeros that the last panel lacks."""
    lacking = -len(rows) % PANEL_ROWS
    return np.pad(rows, ((0, lacking), (0, 0), (0, 0))) if lacking else rows


def _write(rows: Bytes, form: PanelFormat, name: str, written: Bytes) -> None:
    """Write the panels of these rows, which are ``[rows, blocks, bytes of a block]``."""
    panels, blocks = len(rows) // PANEL_ROWS, rows.shape[1]
    groups = written.reshape(panels, blocks, form.group)
    size = form.scale_size
    width = size * PANEL_ROWS
    for place, offset in enumerate([208 if name == "Q6_K" else 0, size][: 1 + form.has_minima]):
        groups[:, :, place * width : (place + 1) * width] = _by_panel(rows[..., offset : offset + size])
    parts = groups[:, :, form.header :].reshape(panels, blocks, form.parts, form.part)
    for place, factors in enumerate(_factors(rows, name)):
        columns = slice(place * PANEL_ROWS, (place + 1) * PANEL_ROWS)
        parts[..., columns] = factors.reshape(panels, PANEL_ROWS, blocks, form.parts).transpose(0, 2, 3, 1)
    place = form.octets
    for bits in _bits(_levels(rows, name), form.high_bits):
        planes = _by_panel(bits).reshape(panels, blocks, form.parts, -1)
        parts[..., place : place + planes.shape[-1]] = planes
        place += planes.shape[-1]
    groups[:, :, form.header :] = parts.reshape(panels, blocks, -1)


def _by_panel(items: Bytes) -> Bytes:
    """From ``[rows, blocks, ..., bytes]`` to ``[panels, blocks, ... x rows of the panel x bytes]``."""
    whole = np.ascontiguousarray(items).view(f"u{items.shape[-1]}")  # copied as integers, not byte by byte
    split = whole.reshape(-1, PANEL_ROWS, *whole.shape[1:])
    found = np.ascontiguousarray(np.moveaxis(split, 1, -2))
    return found.view(np.uint8).reshape(len(split), items.shape[1], -1)


def _factors(rows: Bytes, name: str) -> list[Bytes]:
    """The integers by which parts multiply the scale and the minimum of their block, ``[rows, blocks, parts]``."""
    if name == "Q6_K":
        return [rows[..., 192:208:2], rows[..., 193:208:2]]
    if name not in ("Q4_K", "Q5_K"):
        return []
    scales, minima, third = rows[..., 4:8], rows[..., 8:12], rows[..., 12:16]  # packed by 6 bits each
    return [
        np.concatenate([scales & 63, third & 15 | scales >> 6 << 4], -1),
        np.concatenate([minima & 63, third >> 4 | minima >> 6 << 4], -1),
    ]


def _levels(rows: Bytes, name: str) -> Any:
    """The weights as integers without a sign, ``[rows, blocks, parts, columns]``."""
    if name == "Q8_0":
        return np.bitwise_xor(rows[..., None, 2:], np.uint8(128))
    if name == "int8":
        return np.bitwise_xor(rows[..., 4:].reshape(*rows.shape[:2], 2, PART), np.uint8(128))
    if name == "int4":
        return _nibbles(rows[..., 8:].reshape(*rows.shape[:2], 2, PART // 2)).reshape(*rows.shape[:2], 2, PART)
    if name in ("Q5_0", "Q5_1"):
        low = _nibbles(rows[..., -PART // 2 :][..., None, :]).reshape(*rows.shape[:2], 1, PART)
        high = np.unpackbits(rows[..., -PART // 2 - 4 : -PART // 2], axis=-1, bitorder="little")
        return np.bitwise_or(low, high[..., None, :] << 4)
    if name in ("Q4_0", "Q4_1", "IQ4_NL", "MXFP4"):
        return _nibbles(rows[..., -PART // 2 :][..., None, :]).reshape(*rows.shape[:2], 1, PART)
    if name == "Q6_K":
        low = _nibbles(rows[..., :128].reshape(*rows.shape[:2], 2, 2 * PART))
        high = _shifted(rows[..., 128:192].reshape(*rows.shape[:2], 2, PART), 2)
        return (low.reshape(high.shape) | high << 4).reshape(*rows.shape[:2], 8, PART)
    low = _nibbles(rows[..., -128:].reshape(*rows.shape[:2], 4, PART)).reshape(*rows.shape[:2], 8, PART)
    if name == "Q4_K":
        return low
    return np.bitwise_or(low, _shifted(rows[..., 16:48], 1) << 4)


def _nibbles(octets: Bytes) -> Bytes:
    """The lower halves of octets, then the upper ones."""
    return np.stack([octets & 15, octets >> 4], -2)


def _shifted(octets: Bytes, bits: int) -> Bytes:
    """The lowest bits of octets, then the next ones, and so on."""
    mask = (1 << bits) - 1
    return np.stack([octets >> shift & mask for shift in range(0, 8, bits)], -2)


def _bits(levels: Bytes, high_bits: int) -> list[Bytes]:
    """The lower four bits of two columns in a byte; then the other bits, of as many columns as a byte has room for.

    A result is ``[rows, blocks, parts, planes, columns of a quad]``.
    """
    quads = levels.reshape(*levels.shape[:-1], -1, QUAD)
    found = [_joined(quads & 15, 4)]
    if high_bits:
        found.append(_joined(quads >> 4, high_bits))
    return found


def _joined(quads: Bytes, bits: int) -> Any:
    """Several quads in the bits of one."""
    together = 8 // bits
    count = quads.shape[-2] // together
    if bits == 4:  # a half of the part each
        return np.bitwise_or(quads[..., :count, :], quads[..., count:, :] << 4)
    split = np.ascontiguousarray(quads).view(np.uint32).reshape(*quads.shape[:-2], count, together)
    found = np.zeros(split.shape[:-1], np.uint32)
    for place in range(together):
        found |= split[..., place] << place * bits
    return found[..., None].view(np.uint8)
