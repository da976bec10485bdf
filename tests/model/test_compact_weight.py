"""Weights in 16 bits: matmuls with the bits of float32, and a tensor that other code reads as float32."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import embedding, linear

from hdtool.runtime.kernels.compact_weight import CompactWeight, Stored, expand_compact, is_compact, narrowed
from hdtool.runtime.kernels.linear_layers import compiled_linear
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from tests.support.packed_blocks import NAMES, some_matrix

DTYPES = [torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 6e-8, -5.9e-5, 1e-40, float("inf"), -float("inf"), float("nan"), 65504.0]
"""Zeros, numbers that are subnormal in either format, infinities, NaN and the largest float16."""


def weight_of(outs: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.05 * torch.randn(outs, columns, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_special_numbers_are_expanded_exactly(rows: int, dtype: torch.dtype) -> None:
    """The rows are those of an identity, so a result is one number of the weight."""
    for columns in (COLUMN_MULTIPLE, 16 * COLUMN_MULTIPLE):
        stored = torch.zeros(6, columns, dtype=dtype)
        for place, number in enumerate(SPECIAL):
            stored[place % 6] = 0
            stored[place % 6, place] = number
            numbers = torch.zeros(rows, columns)
            numbers[:, place] = 1
            found = compiled_linear(numbers, stored)
            torch.testing.assert_close(found, compiled_linear(numbers, stored.float()), rtol=0, atol=0, equal_nan=True)
            expected = stored[place % 6, place].float().expand(rows)
            torch.testing.assert_close(found[:, place % 6], expected, rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from([None, *DTYPES]))
def test_numbers_are_narrowed_only_if_none_changes(numbers: list[float], dtype: torch.dtype | None) -> None:
    weight = torch.tensor(numbers, dtype=torch.float32)
    weight = weight if dtype is None else weight.to(dtype).float()
    narrow = narrowed(weight)
    if narrow is not None:
        assert narrow.dtype in DTYPES
        assert torch.equal(narrow.float().view(torch.int32), weight.view(torch.int32))
    elif dtype is not None:
        assert weight.isnan().any()


def test_numbers_past_the_first_ones_count() -> None:
    weight = torch.ones(100, 100)
    assert narrowed(weight) is not None
    weight[99, 99] += 1e-6
    assert narrowed(weight) is None


OPERATIONS: dict[str, Any] = {
    "sum": lambda weight: weight.sum(),
    "matmul": lambda weight: torch.ones(3, weight.shape[1]) @ weight.t(),
    "linear": lambda weight: linear(torch.ones(3, weight.shape[1]), weight),
    "index": lambda weight: weight[torch.tensor([3, 1, 3])],
    "mask": lambda weight: weight[weight > 0],
    "slice": lambda weight: weight[1:3, ::2] * 1,
    "row": lambda weight: weight[2].to(torch.bfloat16).tolist(),
    "embedding": lambda weight: embedding(torch.tensor([[1, 4]]), weight),
    "cat": lambda weight: torch.cat([weight, weight]),
    "to": lambda weight: weight.to(torch.float64),
    "narrow": lambda weight: weight.to(torch.bfloat16),
    "clone": lambda weight: weight.clone().mul_(3),
    "split": lambda weight: [part * 2 for part in weight.split(2)],
    "numpy": lambda weight: expand_compact(weight.detach()).numpy(),
    "bits": lambda weight: weight.view(torch.int32),
    "reduced": lambda weight: torch.stack([weight.std(), weight.abs().max()]),
    "where": lambda weight: torch.where(weight > 0, weight, -weight),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kept", ["bfloat16", "Q4_1"])
def test_other_code_reads_a_float32_tensor(kept: str, name: str, inference: bool) -> None:
    stored: Stored = weight_of(8, 64, torch.bfloat16) if kept == "bfloat16" else some_matrix(NAMES[kept], 8, 64)
    weight = torch.nn.Parameter(CompactWeight(stored), requires_grad=False)
    assert is_compact(weight) and weight.dtype == torch.float32 and weight.shape == (8, 64)
    with torch.inference_mode(inference):
        found, expected = (OPERATIONS[name](one) for one in (weight, stored.float()))
    pairs = zip(found, expected, strict=True) if isinstance(found, (list, tuple)) else [(found, expected)]
    for one, other in pairs:
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else np.array_equal(one, other)


def test_a_weight_is_counted_as_read_if_all_of_it_was_expanded() -> None:
    weight = CompactWeight(weight_of(8, 64, torch.float16))
    embedding(torch.tensor([1]), weight), weight[torch.tensor([2])], weight.detach()[:2].t()
    assert weight.expansions.count == 0
    linear(torch.ones(1, 64), weight)
    assert weight.expansions.count == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight[0].zero_(),
        lambda weight: weight.data.copy_(torch.zeros(8, 64)),
        lambda weight: torch.add(weight, 1, out=weight),
    ],
)
@pytest.mark.parametrize("kept", ["bfloat16", "Q4_1"])
def test_a_compact_weight_cannot_be_changed_unnoticed(kept: str, change: Any) -> None:
    stored: Stored = weight_of(8, 64, torch.bfloat16) if kept == "bfloat16" else some_matrix(NAMES[kept], 8, 64)
    before = stored.float()
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be changed: load the model with dtype float32"):
        change(CompactWeight(stored))
    assert torch.equal(stored.float(), before)


def test_copies_and_files_of_a_weight() -> None:
    stored = weight_of(8, 64, torch.bfloat16)
    weight = torch.nn.Parameter(CompactWeight(stored), requires_grad=False)
    copied = copy.deepcopy(weight)
    assert is_compact(copied) and isinstance(copied.stored, torch.Tensor) and torch.equal(copied.stored, stored)
    assert copied.stored.data_ptr() != stored.data_ptr()
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert not is_compact(read) and torch.equal(read, stored.float())
    assert "bfloat16" in repr(weight)


def test_gradients_pass_through() -> None:
    weight = torch.nn.Parameter(CompactWeight(weight_of(8, 64, torch.bfloat16)), requires_grad=True)
    numbers = torch.ones(2, 64, requires_grad=True)
    linear(numbers, weight).sum().backward()
    assert numbers.grad is not None and torch.equal(numbers.grad[0], expand_compact(weight.detach()).sum(0))
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((8, 64), 2.0))
