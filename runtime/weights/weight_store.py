"""The store of a model's weights: for each parameter, where its pieces lie in files and how they are put together.

A weight is copied into memory when it is read, in the order in which the model needs its rows, and no file stays open
or mapped. An answer therefore doesn't depend on a file that is replaced, truncated or deleted meanwhile. Exceptions
are the blocks of a model that is larger than the free memory or uses int8 matmuls, which stay in the mapped file.
Blocks and 16-bit numbers stay as they are stored, so that a model needs as much memory as its files have bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.kernels.compact_weight import CompactWeight, expand_compact
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME
from hdtool.runtime.kernels.packed_matrix import PackedExperts, PackedMatrix, weight_memory
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.weights.stored_pieces import Piece

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes of formats that store each number by itself."""


def are_read_by_matmul(name: str, columns: int) -> bool:
    """Return True if the compiled matmul reads blocks of the format ``name`` in rows of ``columns`` columns."""
    block_format = FORMATS_BY_NAME.get(name) if EXPANDS_FLOAT16 else None
    return block_format is not None and columns % max(COLUMN_MULTIPLE, block_format.block_size) == 0


@dataclass(frozen=True)
class StoredWeight:
    """How a parameter is put together from the rows of its pieces, one piece after another."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    order: npt.NDArray[np.int64] | None = None
    """For each row of the weight, the index of the row in the pieces; None if the pieces hold the rows in order."""
    transposed: bool = False
    """True if the last two dimensions are swapped once the rows are in order."""
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    """Computes the weight from its expanded pieces; None if reordering rows and transposing suffices."""

    @property
    def format(self) -> str:
        return self.pieces[0].format

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def stays_packed(self) -> bool:
        """True if the weight stays in packed blocks when it is read."""
        formats = {piece.format for piece in self.pieces}
        return (
            self.make is None
            and len(formats) == 1
            and are_read_by_matmul(self.format, self.pieces[0].columns)
            and ((len(self.shape) == 2 and not self.transposed) or len(self.shape) == 3)
            and prod(self.shape) > 0
        )


class WeightRow(NamedTuple):
    """A row of a weight, before its last two dimensions are swapped."""

    numbers: torch.Tensor
    number: int
    """Index of the row, counted over the rows of all matrices."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    transposed: bool


class WeightStore(Mapping[str, StoredWeight]):
    """A model's stored weights by parameter name."""

    def __init__(self, weights: Mapping[str, StoredWeight], source: object) -> None:
        """``source`` names the checkpoint in messages."""
        self._weights, self.source = weights, source
        self.maps_blocks = False
        """True if blocks whose rows are in order are mapped and not copied."""

    def __getitem__(self, name: str) -> StoredWeight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def files(self) -> list[Path]:
        return sorted({piece.file for weight in self.values() for piece in weight.pieces})

    @property
    def bytes(self) -> int:
        """Number of bytes of all pieces."""
        return sum(weight.bytes for weight in self.values())

    def read(self, name: str) -> torch.Tensor:
        """Return a weight as stored or as ``make`` computes it; blocks that no matmul reads are expanded to float32.

        Raise a ``ModelError`` if a file cannot be read or the weight has a wrong shape.
        """
        weight = self[name]
        if not weight.stays_packed:
            numbers = self._numbers(weight)
            if numbers.shape != weight.shape:
                shapes = f"{tuple(numbers.shape)}, where its configuration has {tuple(weight.shape)}"
                raise ModelError(f"{self.source} is damaged: {name} has shape {shapes}: get it again")
            return numbers
        block_format = FORMATS_BY_NAME[weight.format]
        if len(weight.shape) == 2:
            return CompactWeight(PackedMatrix(self._rows(weight), block_format))
        parts, interleaved = _parts_of_experts(weight)
        matrices = [PackedMatrix(self._rows(part), block_format) for part in parts]
        return CompactWeight(
            PackedExperts(matrices, weight.shape[0], is_transposed=weight.transposed, is_interleaved=interleaved)
        )

    def numbers(self, name: str) -> torch.Tensor:
        """Return a weight's numbers in the dtype in which they are stored; blocks are expanded to float32."""
        return expand_compact(self.read(name))

    def middle_row(self, name: str) -> WeightRow | None:
        """Return a row in the middle of a weight; None if the weight is empty or computed by its ``make``."""
        weight = self[name]
        if weight.make or not prod(weight.shape):
            return None
        number = (len(weight.order) if weight.order is not None else sum(piece.rows for piece in weight.pieces)) // 2
        place = number if weight.order is None else int(weight.order[number])
        for piece in weight.pieces:
            if place < piece.rows:
                size = piece.bytes // piece.rows
                shape = piece.shape[-1:] if len(piece.shape) > 1 else (1,)
                row = replace(piece, offset=piece.offset + place * size, bytes=size, shape=shape)
                return WeightRow(self._expanded(row), number, weight.shape, weight.transposed)
            place -= piece.rows
        raise AssertionError

    def _numbers(self, weight: StoredWeight) -> torch.Tensor:
        if weight.make:
            return weight.make([self._expanded(piece) for piece in weight.pieces])
        if weight.format in DTYPES and len({piece.format for piece in weight.pieces}) == 1:
            rows = self._rows(weight).view(DTYPES[weight.format])
        else:
            rows = torch.cat([_as_rows(self._expanded(piece)) for piece in weight.pieces])
            rows = rows if weight.order is None else rows[torch.from_numpy(weight.order)]
        if not weight.transposed:
            return rows.view(weight.shape)
        *others, columns, count = weight.shape
        return rows.view(*others, count, columns).transpose(-1, -2)

    def _rows(self, weight: StoredWeight) -> torch.Tensor:
        """Return the bytes of the rows of a weight, in order."""
        first, *others = weight.pieces
        if not others and weight.order is None:
            is_mapped = self.maps_blocks and weight.format in FORMATS_BY_NAME
            return _mapped(first) if is_mapped else self._bytes(first).view(first.rows, -1)
        total = sum(piece.rows for piece in weight.pieces)
        order = np.arange(total) if weight.order is None else weight.order
        places = np.argsort(order)
        row_bytes, start = first.bytes // first.rows, 0
        rows = weight_memory(len(order) * row_bytes).view(-1, row_bytes)
        for piece in weight.pieces:  # one by one, which needs little temporary memory
            below, end = np.searchsorted(order, (start, start + piece.rows), sorter=places)
            own, content = places[below:end], self._bytes(piece).view(piece.rows, -1).numpy()
            rows.numpy()[_as_slice(own)] = content[_as_slice(order[own] - start)]
            start += piece.rows
        return rows

    def _expanded(self, piece: Piece) -> torch.Tensor:
        """Return a piece's numbers; blocks are expanded to float32."""
        content = self._bytes(piece)
        if piece.format in DTYPES:
            return content.view(DTYPES[piece.format]).view(piece.shape)
        rows = piece.rows if len(piece.shape) > 1 else 1
        return expanded_blocks(content.view(rows, -1), piece.format).view(piece.shape)

    def _bytes(self, piece: Piece) -> torch.Tensor:
        content = weight_memory(piece.bytes)
        memory, done = memoryview(cast(Any, content.numpy())), 0
        try:
            with piece.file.open("rb", buffering=0) as stream:
                stream.seek(piece.offset)
                while done < piece.bytes and (count := stream.readinto(memory[done:])):
                    done += count
        except FileNotFoundError:
            done = 0
        except OSError as error:
            raise ModelError(
                f"{piece.file} cannot be read ({error.strerror or error}): correct the permissions"
            ) from error
        if done < piece.bytes:
            raise ModelError(f"{self.source} was changed while it was read: run the command again")
        return content


def _as_slice(numbers: npt.NDArray[np.int64]) -> Any:
    """Return consecutive numbers as a slice, which copies faster; return others unchanged."""
    if not len(numbers) or (np.diff(numbers) != 1).any():
        return numbers
    return slice(numbers[0], numbers[-1] + 1)


def _parts_of_experts(weight: StoredWeight) -> tuple[list[StoredWeight], bool]:
    """Return the parts in which experts can be read, and whether the parts' rows alternate in the weight.

    There are two parts if each piece has half of every expert's rows, as gate and up projections do in GGUF files.
    """
    if len(weight.pieces) == 2 and weight.order is not None:
        first, second = weight.pieces
        numbers = np.arange(first.rows + second.rows)
        if first.shape == second.shape and len(weight.order) == len(numbers):
            by_half = numbers.reshape(2, weight.shape[0], -1)
            for axes, interleaved in (((1, 0, 2), False), ((1, 2, 0), True)):
                if (by_half.transpose(axes).reshape(-1) == weight.order).all():
                    return [StoredWeight((piece,), piece.shape) for piece in weight.pieces], interleaved
    return [weight], False


def _mapped(piece: Piece) -> torch.Tensor:
    """Return the bytes of a piece's rows in its mapped file."""
    content = torch.from_file(str(piece.file), shared=False, size=piece.offset + piece.bytes, dtype=torch.uint8)
    return content[piece.offset :].view(piece.rows, -1)


def _as_rows(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(-1, numbers.shape[-1]) if numbers.dim() > 1 else numbers.reshape(-1, 1)


def expanded_blocks(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Expand rows of blocks to float32, with compiled code where it reads the format, else with the library gguf."""
    block_format = FORMATS_BY_NAME.get(name)
    columns = rows.shape[1] // block_format.bytes * block_format.block_size if block_format else 0
    if block_format and are_read_by_matmul(name, columns):
        return PackedMatrix(rows, block_format).float()
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[name]))
