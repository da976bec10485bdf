"""Finds out how a library puts a parameter together, by giving it row and column numbers in place of the weights.

What the library makes of the numbers tells where each row of the parameter comes from, and whether it was transposed.
Any number that isn't one of those given means that the library computes new values, or reorders columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.weights.stored_pieces import Piece
from hdtool.runtime.weights.weight_store import StoredWeight

Doubles = npt.NDArray[np.float64]
Convert = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Function that makes a parameter from the contents of its pieces."""
FIRST, STEP = 7, 3
"""First number of the series and distance between numbers; changed values are unlikely to fall on this series."""


def traced(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    convert: Convert,
    *,
    full: bool = False,
    sample: Callable[[Piece], torch.Tensor] | None = None,
) -> StoredWeight:
    """Return how ``convert`` makes a parameter of this shape: by reordering rows, or else by computing values.

    Each piece is replaced by a single column, and a single row, of numbers. If that fails, or if ``full`` says that the
    result depends on the pieces' shapes, the numbers have the pieces' shapes. ``sample`` returns the first columns of a
    piece's contents; if given, an arrangement found with single columns must also hold for these.
    """
    for whole in (True,) if full else (False, True):
        with suppress(Exception):  # a library may need other shapes or refuse
            weight = _arranged(pieces, shape, convert, whole)
            if weight and (whole or sample is None or _holds(weight, convert, list(map(sample, pieces)))):
                return weight
    return StoredWeight(tuple(pieces), shape, make=lambda parts: convert([part.float() for part in parts]))


def _arranged(pieces: Sequence[Piece], shape: tuple[int, ...], convert: Convert, whole: bool) -> StoredWeight | None:
    columns = {piece.columns for piece in pieces}
    if len(columns) != 1:
        return None
    (width,) = columns
    rows = convert(_row_numbers(pieces, whole)).numpy()
    if width == 1 and all(len(piece.shape) < 2 for piece in pieces):
        return _weight(pieces, shape, rows, transposed=False)
    numbers = convert(_column_numbers(pieces, whole)).numpy()
    for transposed in (False, True):
        if len(shape) < 2 or shape[-2 if transposed else -1] != width:
            continue
        by_row, by_column = (np.swapaxes(array, -1, -2) if transposed else array for array in (rows, numbers))
        first = by_row[..., :1]
        if (by_row == first).all() and by_row.shape[-1] == (width if whole else 1) and _is_in_order(by_column, width):
            return _weight(pieces, shape, first, transposed=transposed)
    return None


def _holds(weight: StoredWeight, convert: Convert, parts: list[torch.Tensor]) -> bool:
    """Return True if ``convert`` arranges the rows of ``parts`` as ``weight`` says."""
    expected = convert(parts)
    rows = torch.cat([part.reshape(piece.rows, -1) for piece, part in zip(weight.pieces, parts, strict=True)])
    rows = rows if weight.order is None else rows[torch.from_numpy(weight.order)]
    found = expected.transpose(-1, -2) if weight.transposed else expected
    return torch.equal(found.reshape(rows.shape).float().view(torch.int32), rows.float().view(torch.int32))


def _row_numbers(pieces: Sequence[Piece], whole: bool) -> list[torch.Tensor]:
    numbers, first = [], FIRST
    for piece in pieces:
        count = piece.rows
        series = torch.arange(first, first + STEP * count, STEP, dtype=torch.float64)
        first += STEP * count
        if len(piece.shape) < 2:
            numbers.append(series.view(piece.shape))
        else:
            column = series.view(*piece.shape[:-1], 1)
            numbers.append(column.expand(piece.shape).contiguous() if whole else column)
    return numbers


def _column_numbers(pieces: Sequence[Piece], whole: bool) -> list[torch.Tensor]:
    numbers = []
    for piece in pieces:
        series = torch.arange(FIRST, FIRST + STEP * piece.shape[-1], STEP, dtype=torch.float64)
        shape = piece.shape if whole else (*piece.shape[:-2], 1, piece.shape[-1])
        numbers.append(series.expand(shape).contiguous())
    return numbers


def _is_in_order(by_column: Doubles, width: int) -> bool:
    return by_column.shape[-1] == width and bool((by_column == FIRST + STEP * np.arange(width)).all())


def _weight(pieces: Sequence[Piece], shape: tuple[int, ...], rows: Any, *, transposed: bool) -> StoredWeight | None:
    """Return the weight whose rows are the pieces' rows with these numbers; None if some numbers are no row's."""
    order, rest = np.divmod(rows.reshape(-1) - FIRST, STEP)
    total = sum(piece.rows for piece in pieces)
    is_whole = len(order) * pieces[0].columns == prod(shape)
    if rest.any() or not ((order >= 0) & (order < total)).all() or not is_whole:
        return None
    order = order.astype(np.int64)
    in_order = len(order) == total and bool((order == np.arange(total)).all())
    return StoredWeight(tuple(pieces), shape, None if in_order else order, transposed)
