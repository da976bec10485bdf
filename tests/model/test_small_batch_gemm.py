"""Products of few rows: right for all shapes, chosen by what is faster, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.kernels import matmul_rule
from hdtool.runtime.kernels import small_batch_linear as layers
from hdtool.runtime.kernels.gemm_tiles import MOST_OUTS
from hdtool.runtime.kernels.many_rows_gemm import BLOCK_NUMBERS, GROUP, MOST_COLUMNS, MOST_TOGETHER
from hdtool.runtime.kernels.matmul_rule import uses_own_matmul
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE, MOST_OF_NUMBERS
from hdtool.runtime.kernels.small_batch_linear import (
    ProductChoice,
    SmallBatchLinear,
    has_own_products,
    own_linear,
    share_weights,
    use_small_batch_products,
)
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import LARGEST_TREE
from tests.support.decoding import run, said
from tests.support.families import SHAPE, VOCABULARY
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.trees import LyingDrafter

MOST = 256
"""Rows of a piece of a prompt."""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def own_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Our own product is taken wherever it may be; how many rows it was given."""
    seen: list[int] = []

    def noted(input: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(input.numel() // input.shape[-1])
        return own_linear(input, *others)

    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: True)
    monkeypatch.setattr(layers, "own_linear", noted)
    return seen


def wide() -> Any:
    """A model with layers that our own product supports."""
    wider = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**{**SHAPE, **wider}))
    return model.eval()


def layer_of(columns: int = COLUMN_MULTIPLE, outs: int = 5, *, bias: bool = True) -> Linear:
    layer = Linear(columns, outs, bias=bias)
    use_small_batch_products(torch.nn.ModuleList([layer]))
    return layer


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None)
def test_products_are_correct(rows: int, outs: int, wholes: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    columns = wholes * COLUMN_MULTIPLE
    numbers, matrix = torch.randn(rows, columns), torch.randn(outs, columns)
    added = torch.randn(outs) if bias else torch.zeros(outs)
    found = own_linear(numbers, matrix, added if bias else None).numpy()
    exact = numbers.numpy().astype(np.float64) @ matrix.numpy().astype(np.float64).T + added.numpy()
    magnitude = numbers.abs().numpy() @ matrix.abs().numpy().T + added.abs().numpy()
    assert (np.abs(found - exact) <= columns * np.finfo(np.float32).eps * magnitude).all()


@given(st.integers(1, 12), st.integers(1, 9), st.data())
@settings(deadline=None)
def test_nan_stays_in_its_row(rows: int, outs: int, data: st.DataObject) -> None:
    numbers, matrix = torch.ones(rows, COLUMN_MULTIPLE), torch.ones(outs, COLUMN_MULTIPLE)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, COLUMN_MULTIPLE - 1))
    numbers[row, column] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    matrix[data.draw(st.integers(0, outs - 1)), column] = data.draw(st.sampled_from([0.0, 1.0, -1.0]))
    torch.testing.assert_close(own_linear(numbers, matrix), linear(numbers, matrix), equal_nan=True, rtol=0, atol=0)


def test_a_row_does_not_depend_on_other_rows(own_rows: list[int]) -> None:
    layer, numbers = layer_of(256, 30), torch.randn(MOST, 256)
    tried = [*range(1, MOST_OF_NUMBERS + 2 * GROUP), MOST]
    with torch.inference_mode():
        alone = torch.cat([layer(row) for row in numbers.split(1)])
        for rows in tried:
            assert torch.equal(layer(numbers[:rows]), alone[:rows])
    assert own_rows == [1] * MOST + tried


@pytest.mark.parametrize(
    "shape",
    [
        (COLUMN_MULTIPLE,),
        (1, COLUMN_MULTIPLE),
        (2, 3, COLUMN_MULTIPLE),
        (0, COLUMN_MULTIPLE),
        (1, MOST, COLUMN_MULTIPLE),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_shape(shape: tuple[int, ...], bias: bool, own_rows: list[int]) -> None:
    layer, numbers = layer_of(bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(layer(numbers), linear(numbers, layer.weight, layer.bias))
    assert len(own_rows) == 1


def test_the_product_of_torch_is_used_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, numbers = layer_of(), torch.randn(MOST + 1, COLUMN_MULTIPLE)
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: False)
    with torch.inference_mode():
        assert torch.equal(layer(numbers), linear(numbers, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [COLUMN_MULTIPLE, MOST_COLUMNS, MOST_COLUMNS + COLUMN_MULTIPLE, 3 * MOST_COLUMNS])
def test_rows_of_prompts_have_the_bits_of_single_rows(columns: int, dtype: torch.dtype) -> None:
    outs = BLOCK_NUMBERS // columns + 2 * MOST_OUTS + 3
    matrix, numbers = torch.randn(outs, columns).to(dtype), torch.randn(MOST_TOGETHER + GROUP + 1, columns)
    alone = torch.cat([own_linear(row, matrix) for row in numbers.split(1)])
    for rows in (MOST_OF_NUMBERS + 1, MOST_OF_NUMBERS + GROUP - 1, MOST_TOGETHER, len(numbers)):
        assert torch.equal(own_linear(numbers[:rows], matrix), alone[:rows])
        others = torch.full((rows, columns), float("nan"))
        others[rows // 2] = numbers[rows // 2]
        assert torch.equal(own_linear(others, matrix)[rows // 2], alone[rows // 2])


@pytest.mark.parametrize(
    "numbers",
    [torch.randn(COLUMN_MULTIPLE, 3).t(), torch.randn(2, 5, COLUMN_MULTIPLE)[:, -1:]],
    ids=["transposed", "last rows"],
)
def test_rows_with_gaps_between_numbers_are_copied(numbers: torch.Tensor, own_rows: list[int]) -> None:
    layer = layer_of()
    with torch.inference_mode():
        assert torch.equal(layer(numbers), layer(numbers.clone(memory_format=torch.contiguous_format)))
    assert len(own_rows) == 2


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_dtype_does_not_matter(default: torch.dtype, own_rows: list[int]) -> None:
    layer, numbers = layer_of(), torch.randn(3, COLUMN_MULTIPLE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.inference_mode():
            found = layer(numbers)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, linear(numbers, layer.weight, layer.bias))
    assert own_rows[0] == 3


def test_layers_can_be_trained_and_converted(own_rows: list[int]) -> None:
    layer = layer_of()
    layer(torch.ones(2, COLUMN_MULTIPLE)).sum().backward()
    assert layer.weight.grad is not None
    layer.to(torch.float64)
    with torch.inference_mode():
        assert layer(torch.ones(2, COLUMN_MULTIPLE, dtype=torch.float64)).dtype == torch.float64
        with pytest.raises(RuntimeError):
            layer(torch.ones(2, COLUMN_MULTIPLE))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer.to(torch.float32)(torch.ones(1, 2 * COLUMN_MULTIPLE))
    assert own_rows == []


def test_unsupported_layers_are_not_changed() -> None:
    odd = Linear(COLUMN_MULTIPLE + 1, 3)
    transposed, half, fit = (Linear(COLUMN_MULTIPLE, COLUMN_MULTIPLE) for _ in range(3))
    transposed.weight.data = transposed.weight.data.t()
    half.to(torch.bfloat16)
    use_small_batch_products(torch.nn.ModuleList([odd, transposed, half]))
    assert not has_own_products(torch.nn.ModuleList([odd, transposed, half]))
    use_small_batch_products(torch.nn.ModuleList([odd, fit]))
    assert [type(layer) for layer in (odd, fit)] == [Linear, SmallBatchLinear]


def test_the_rule_serves_trees_and_short_rows_by_our_own_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_rule, "SLOW_IN_TORCH", False)
    rows, columns = (1, LARGEST_TREE + 1, LARGEST_TREE + 2, MOST), (64, 2048, 2049, 18944)
    served = {size: [uses_own_matmul(count, size) for count in rows] for size in columns}
    assert served[64] == served[2048] == [True] * 4
    assert served[2049] == served[18944] == [True] * 2 + [False] * 2
    monkeypatch.setattr(matmul_rule, "SLOW_IN_TORCH", True)
    assert all(uses_own_matmul(count, size) for count in rows for size in columns)


@pytest.mark.parametrize("own", [True, False])
def test_the_matmul_of_a_model_can_be_fixed(own: bool) -> None:
    model = wide()
    use_small_batch_products(model, own)
    made: Any = next(layer for layer in model.modules() if isinstance(layer, SmallBatchLinear))
    assert [made.choice.own(rows) for rows in (1, MOST, MOST + 1)] == [own] * 3


def test_drafts_do_not_change_the_answer_of_a_model(own_rows: list[int]) -> None:
    stock, model = wide(), wide()
    use_small_batch_products(model)
    prompt = prompt_of(20)
    assert_same_logits(plain_logits(model, prompt), plain_logits(stock, prompt))
    plain = said(run(Target(model), prompt, SamplingConfig()))
    assert plain == generated(stock, prompt, len(plain))
    liar = LyingDrafter(len(prompt), plain, VOCABULARY, seed=1)
    assert said(run(Target(model), prompt, SamplingConfig(), drafter=liar)) == plain
    assert liar.accepted > 0
    assert {1, 20} < set(own_rows)


def test_one_copy_of_weights_serves_two_models() -> None:
    stock, model = wide(), wide()
    use_small_batch_products(model)
    share_weights(stock, model)
    shared = {name for name, weight in model.named_parameters() if weight.data_ptr() == _address(stock, name)}
    assert shared == {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, SmallBatchLinear)}
    assert not has_own_products(stock)


def _address(model: Any, name: str) -> int:
    found: int = model.get_parameter(name).data_ptr()
    return found
