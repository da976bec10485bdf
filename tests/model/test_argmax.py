"""The arg-max of a row is that of NumPy over its numbers in double precision, whatever the type and the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdtool.runtime.kernels.argmax import BITS, BLOCK, argmax_of, bits_of

INFINITY, NAN = float("inf"), float("nan")
LENGTHS = (1, 5, 64, BLOCK, BLOCK + 1, 3 * BLOCK + 77)
VALUES = {
    "any": (),
    "equal ones": (9.0, 9.0, 9.0),
    "NaN": (NAN, INFINITY, NAN),
    "negative NaN": (-NAN, 3.0),
    "infinity": (INFINITY, INFINITY),
    "zeros": (-0.0, 0.0, -0.0),
    "minus infinity": (-INFINITY, -INFINITY),
}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_it_is_the_first_of_the_highest_numbers(values: tuple[float, ...], dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(len(values))
    for length in LENGTHS:
        row = -1 - torch.randn(length, generator=chance).abs().to(dtype)
        for value, place in zip(values, torch.randint(length, (len(values),), generator=chance), strict=True):
            row[place] = value
        check(row)
    check(torch.full((BLOCK,), -INFINITY, dtype=dtype))


def check(row: torch.Tensor) -> None:
    bits = bits_of(row[None])
    expected = row.double().numpy()
    token = int(expected.argmax())
    assert argmax_of(bits.rows[0], bits.infinity) == (token, np.isfinite(expected[token]))


def test_logits_are_not_copied() -> None:
    for dtype in BITS:
        logits = torch.randn(3, 50).to(dtype)
        assert bits_of(logits[1:]).rows.ctypes.data == logits[1:].data_ptr()
