"""The arg-max of a row is that of NumPy over its numbers in double precision, whatever the type and the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdtool.runtime.kernels.topk import ARGMAX_BLOCK, INFINITY, argmax_of_row, bits_of, readable

HIGHEST, NAN = float("inf"), float("nan")
LENGTHS = (1, 5, 64, ARGMAX_BLOCK, ARGMAX_BLOCK + 1, 3 * ARGMAX_BLOCK + 77)
VALUES = {
    "any": (),
    "equal ones": (9.0, 9.0, 9.0),
    "NaN": (NAN, HIGHEST, NAN),
    "negative NaN": (-NAN, 3.0),
    "infinity": (HIGHEST, HIGHEST),
    "zeros": (-0.0, 0.0, -0.0),
    "minus infinity": (-HIGHEST, -HIGHEST),
}


@pytest.mark.parametrize("dtype", INFINITY)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_it_is_the_first_of_the_highest_numbers(values: tuple[float, ...], dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(len(values))
    for length in LENGTHS:
        row = -1 - torch.randn(length, generator=chance).abs().to(dtype)
        for value, place in zip(values, torch.randint(length, (len(values),), generator=chance), strict=True):
            row[place] = value
        check(row)
    check(torch.full((ARGMAX_BLOCK,), -HIGHEST, dtype=dtype))


def check(row: torch.Tensor) -> None:
    expected = row.double().numpy()
    token = int(expected.argmax())
    assert argmax_of_row(*bits_of(torch.stack([row, row])), 1) == (token, np.isfinite(expected[token]))


def test_rows_of_a_larger_tensor_are_read_where_they_are() -> None:
    logits = torch.randn(3, 2, 50)
    assert [argmax_of_row(*bits_of(logits[:, 1]), row)[0] for row in range(3)] == logits[:, 1].argmax(-1).tolist()
    assert readable(logits[:, 1]).data_ptr() == logits[:, 1].data_ptr()
    columns = logits[:, 1].t()
    assert [argmax_of_row(*bits_of(rows), 7)[0] for rows in [readable(columns)]] == [int(columns[7].argmax())]
