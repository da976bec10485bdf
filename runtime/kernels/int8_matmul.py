"""Rearranges packed weights into panels and multiplies them by activations that are quantized to int8.

Each row of activations has its own scales and sums, so a row's results don't depend on other rows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import c_function
from hdtool.runtime.kernels.int8_dot_products import PANEL_ROWS, PART, QUAD, PanelFormat, panel_format
from hdtool.runtime.kernels.int8_tiles import INT8_TILE_ROWS, RECORD_SIZE, panel_tile, quantize_row
from hdtool.runtime.kernels.matmul import PREPARE, PREPARED_COLUMNS, TILES, Kernels
from hdtool.runtime.kernels.matrix_formats import BlockFormat, by_rows
from hdtool.runtime.kernels.packed_matrix import weight_memory
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

_tile_by_rows = by_rows({rows: panel_tile(rows) for rows in range(1, INT8_TILE_ROWS + 1)})


@cache
def int8_matmul_of(format: BlockFormat) -> Kernels:
    """Compile a format's int8 matmul; callers must keep the result alive while using its address."""
    form = panel_format(format)
    return Kernels(
        block_size=PART * form.parts,
        bytes=form.group,
        stored_rows=PANEL_ROWS,
        tile_out_features=PANEL_ROWS,
        tiles=_tiles_of(format).address,
        tile_rows=INT8_TILE_ROWS,
        prepare=_quantize_of(format).address,
        prepared_bytes=RECORD_SIZE * PREPARED_COLUMNS // PART,
    )


@c_function(TILES)
def _tiles_of(format: BlockFormat) -> Any:
    """Return the function that multiplies panels in the given format by a tile of rows."""
    name = format.name

    def multiply_tiles(
        panels: int,
        stride: int,
        out_features: int,
        columns: int,
        records: int,
        outputs: int,
        output_stride: int,
        rows: int,
    ) -> None:
        """Multiply whole panels by up to ``INT8_TILE_ROWS`` quantized rows."""
        for out in range(0, out_features, PANEL_ROWS):
            panel, written = panels + out // PANEL_ROWS * stride, outputs + out * ITEM_SIZE
            _tile_by_rows(panel, name, columns, records, written, output_stride, rows)

    return multiply_tiles


@c_function(PREPARE)
def _quantize_of(format: BlockFormat) -> Any:
    """Return the function that quantizes input rows for a format's matmul."""
    name = format.name

    def quantize(inputs: int, columns: int, rows: int, written: int, _: int) -> None:
        for row in range(rows):
            at = written + row * (columns // PART) * RECORD_SIZE
            quantize_row(inputs + row * columns * ITEM_SIZE, name, columns, at)

    return quantize


Bytes = npt.NDArray[Any]
"""Arrays of uint8."""
MAX_CHUNK_BYTES = 1 << 20
"""Number of bytes to rearrange at a time, so that intermediate results stay in the cache."""


class Panels:
    """A packed matrix rearranged into panels, and the address of the matmul that multiplies them."""

    def __init__(self, blocks: torch.Tensor, format: BlockFormat) -> None:
        """``blocks`` are the packed bytes of the matrix, one row per matrix row; they are copied."""
        self.format = format
        self.shape = torch.Size((len(blocks), blocks.shape[1] // format.bytes * format.block_size))
        out_features, columns = self.shape
        form = panel_format(format)
        count = -(-out_features // PANEL_ROWS)
        self.matmul = int8_matmul_of(format).address
        self.memory = weight_memory(count * form.bytes(columns)).view(count, -1)
        rows, written = blocks.numpy().reshape(out_features, -1, format.bytes), self.memory.numpy()
        step = max(1, MAX_CHUNK_BYTES // (PANEL_ROWS * blocks.shape[1]))

        def rearrange(first: int) -> None:
            rows_of_panels = _whole_panels(rows[first * PANEL_ROWS : (first + step) * PANEL_ROWS])
            _write(rows_of_panels, form, format.name, written[first : first + step])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # NumPy releases the GIL while it computes
            list(pool.map(rearrange, range(0, count, step)))

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def _whole_panels(rows: Bytes) -> Bytes:
    """Pad the rows with zeros so that they fill whole panels."""
    missing = -len(rows) % PANEL_ROWS
    return np.pad(rows, ((0, missing), (0, 0), (0, 0))) if missing else rows


def _write(rows: Bytes, form: PanelFormat, name: str, written: Bytes) -> None:
    """Write ``rows [rows, blocks, bytes per block]`` as panels; the row count must be a multiple of ``PANEL_ROWS``."""
    panels, blocks = len(rows) // PANEL_ROWS, rows.shape[1]
    groups = written.reshape(panels, blocks, form.group)
    size = form.scale_size
    width = size * PANEL_ROWS
    for index, offset in enumerate([208 if name == "Q6_K" else 0, size][: 1 + form.has_minima]):
        groups[:, :, index * width : (index + 1) * width] = _by_panel(rows[..., offset : offset + size])
    parts = groups[:, :, form.header :].reshape(panels, blocks, form.parts, form.part)
    for index, factors in enumerate(_factors(rows, name)):
        columns = slice(index * PANEL_ROWS, (index + 1) * PANEL_ROWS)
        parts[..., columns] = factors.reshape(panels, PANEL_ROWS, blocks, form.parts).transpose(0, 2, 3, 1)
    index = form.octets
    for bits in _bits(_levels(rows, name), form.high_bits):
        planes = _by_panel(bits).reshape(panels, blocks, form.parts, -1)
        parts[..., index : index + planes.shape[-1]] = planes
        index += planes.shape[-1]
    groups[:, :, form.header :] = parts.reshape(panels, blocks, -1)


def _by_panel(items: Bytes) -> Bytes:
    """Reorder ``[rows, blocks, ..., bytes]`` to ``[panels, blocks, ... * rows per panel * bytes]``."""
    whole = np.ascontiguousarray(items).view(f"u{items.shape[-1]}")  # copying integers is faster than copying bytes
    split = whole.reshape(-1, PANEL_ROWS, *whole.shape[1:])
    by_panel = np.ascontiguousarray(np.moveaxis(split, 1, -2))
    return by_panel.view(np.uint8).reshape(len(split), items.shape[1], -1)


def _factors(rows: Bytes, name: str) -> list[Bytes]:
    """Return each part's integer factors for its block's scales and minimum, as arrays ``[rows, blocks, n]``.

    ``n`` is the number of parts. The list is empty for formats without such factors.
    """
    if name == "Q6_K":
        return [rows[..., 192:208:2], rows[..., 193:208:2]]
    if name not in ("Q4_K", "Q5_K"):
        return []
    scales, minima, third = rows[..., 4:8], rows[..., 8:12], rows[..., 12:16]  # 6 bits each; third has low bits of both
    return [
        np.concatenate([scales & 63, third & 15 | scales >> 6 << 4], -1),
        np.concatenate([minima & 63, third >> 4 | minima >> 6 << 4], -1),
    ]


def _levels(rows: Bytes, name: str) -> Any:
    """Return the weights' levels, or four-bit codes, as unsigned integers ``[rows, blocks, parts, columns]``."""
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
    """Return the lower four bits of bytes ``[..., n]``, then the upper four bits, as ``[..., 2, n]``."""
    return np.stack([octets & 15, octets >> 4], -2)


def _shifted(octets: Bytes, bits: int) -> Bytes:
    """Split bytes ``[..., n]`` into groups of ``bits`` bits, lowest first, as ``[..., 8 // bits, n]``."""
    mask = (1 << bits) - 1
    return np.stack([octets >> shift & mask for shift in range(0, 8, bits)], -2)


def _bits(levels: Bytes, high_bits: int) -> list[Bytes]:
    """Pack the levels' lower four bits, two columns per byte, and upper bits, ``8 // high_bits`` columns per byte.

    Each result has the shape ``[rows, blocks, parts, planes, QUAD]``.
    """
    quads = levels.reshape(*levels.shape[:-1], -1, QUAD)
    planes = [_joined(quads & 15, 4)]
    if high_bits:
        planes.append(_joined(quads >> 4, high_bits))
    return planes


def _joined(quads: Bytes, bits: int) -> Any:
    """Pack quads of ``bits``-bit values; ``8 // bits`` of these quads fill four bytes."""
    per_byte = 8 // bits
    count = quads.shape[-2] // per_byte
    if bits == 4:  # low bits hold the first half of the part, high bits the second
        return np.bitwise_or(quads[..., :count, :], quads[..., count:, :] << 4)
    split = np.ascontiguousarray(quads).view(np.uint32).reshape(*quads.shape[:-2], count, per_byte)
    packed = np.zeros(split.shape[:-1], np.uint32)
    for index in range(per_byte):
        packed |= split[..., index] << index * bits
    return packed[..., None].view(np.uint8)
