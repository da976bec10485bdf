"""Compiled linear layers: right for all shapes, the same bits for a row in any company, and the same tokens."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from hdtool.runtime.kernels import block_gemm, linear_layers as layers, panel_gemm
from hdtool.runtime.kernels.block_gemm import BLOCK_OUT_FEATURES
from hdtool.runtime.kernels.compact_weight import sharing
from hdtool.runtime.kernels.compiled import zeroed_records
from hdtool.runtime.kernels.gemm_tiles import TILE_OUT_FEATURES, Operands, unpack_of
from hdtool.runtime.kernels.linear_layers import (
    CompiledLinear,
    compile_linear_layers,
    compiled_linear,
    has_compiled_layers,
    share_weights,
)
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE, KERNELS, MAX_CACHED_VALUES, MAX_REGISTER_ROWS
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, BFLOAT16, BlockFormat
from hdtool.runtime.kernels.panel_gemm import GROUP, MAX_LONG_COLUMNS, MAX_RANGE, MAX_ROWS, PANEL
from hdtool.runtime.kernels.transposed_rows import expand_of, transpose_of
from hdtool.runtime.target.target import Target
from tests.support.decoding import assert_lossless
from tests.support.families import SHAPE
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.packed_blocks import MAX_BLOCK_SIZE, expected, some_matrix

pytestmark = pytest.mark.usefixtures("home")

MANY_ROWS = 256
"""More rows than a pass of the compiled model has."""


@pytest.fixture
def compiled_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the compiled matmul was given."""
    seen: list[int] = []

    def noted(input: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(input.numel() // input.shape[-1])
        return compiled_linear(input, *others)

    monkeypatch.setattr(layers, "compiled_linear", noted)
    return seen


def wide() -> Any:
    """A model with layers that the compiled matmul takes."""
    wider = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**{**SHAPE, **wider}))
    return model.eval()


def layer_of(columns: int = COLUMN_MULTIPLE, out_features: int = 5, *, bias: bool = True) -> Linear:
    model = torch.nn.Sequential(Linear(columns, out_features, bias=bias))
    compile_linear_layers(model)
    layer = model[0]
    assert isinstance(layer, CompiledLinear)
    return layer


Kind = torch.dtype | BlockFormat
DTYPES = torch.float32, torch.bfloat16, torch.float16


def stored(kind: Kind, out_features: int, columns: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """A matrix in a dtype or in blocks, and its numbers in float32."""
    if isinstance(kind, BlockFormat):
        matrix = some_matrix(kind, out_features, columns, seed)
        return matrix, torch.from_numpy(expected(matrix))
    weight = torch.randn(out_features, columns, generator=torch.Generator().manual_seed(seed)).to(kind)
    return weight, weight.float()


@given(
    kind=st.sampled_from([*DTYPES, *ALL_FORMATS]),
    rows=st.integers(1, 130),
    out_features=st.integers(1, 70),
    wholes=st.sampled_from([1, 2, 3, 6, 9, 16, 17]),
    bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=50)
def test_results_are_correct_and_have_the_bits_of_float32(
    kind: Kind, rows: int, out_features: int, wholes: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    columns = wholes * (max(COLUMN_MULTIPLE, kind.block_size) if isinstance(kind, BlockFormat) else COLUMN_MULTIPLE)
    matrix, wide = stored(kind, out_features, columns, seed)
    numbers, added = torch.randn(rows, columns), torch.randn(out_features) if bias else None
    found = compiled_linear(numbers, matrix, added)
    assert torch.equal(found, compiled_linear(numbers, wide, added))
    exact = numbers.double() @ wide.double().T + (0 if added is None else added)
    magnitude = numbers.double().abs() @ wide.double().abs().T + (0 if added is None else added.abs())
    assert ((found - exact).abs() <= columns * torch.finfo(torch.float32).eps * magnitude).all()


@given(st.integers(1, 12), st.integers(1, 9), st.data())
@settings(deadline=None)
def test_nan_stays_in_its_row(rows: int, out_features: int, data: st.DataObject) -> None:
    numbers, matrix = torch.ones(rows, COLUMN_MULTIPLE), torch.ones(out_features, COLUMN_MULTIPLE)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, COLUMN_MULTIPLE - 1))
    numbers[row, column] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    matrix[data.draw(st.integers(0, out_features - 1)), column] = data.draw(st.sampled_from([0.0, 1.0, -1.0]))
    torch.testing.assert_close(
        compiled_linear(numbers, matrix), linear(numbers, matrix), equal_nan=True, rtol=0, atol=0
    )


def test_a_row_does_not_depend_on_other_rows(compiled_rows: list[int]) -> None:
    layer, numbers = layer_of(256, 30), torch.randn(MANY_ROWS, 256)
    tried = [*range(1, MAX_REGISTER_ROWS + 6 * GROUP), MANY_ROWS]
    with torch.inference_mode():
        alone = torch.cat([layer(row) for row in numbers.split(1)])
        for rows in tried:
            assert torch.equal(layer(numbers[:rows]), alone[:rows])
    assert compiled_rows == [1] * MANY_ROWS + tried


@pytest.mark.parametrize(
    "shape",
    [
        (COLUMN_MULTIPLE,),
        (1, COLUMN_MULTIPLE),
        (2, 3, COLUMN_MULTIPLE),
        (0, COLUMN_MULTIPLE),
        (1, MANY_ROWS, COLUMN_MULTIPLE),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_shape(shape: tuple[int, ...], bias: bool, compiled_rows: list[int]) -> None:
    layer, numbers = layer_of(bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(layer(numbers), linear(numbers, layer.weight, layer.bias))
    assert len(compiled_rows) == 1


COLUMNS = (
    COLUMN_MULTIPLE,
    MAX_CACHED_VALUES // 6 // COLUMN_MULTIPLE * COLUMN_MULTIPLE,  # six long rows fill the cache
    MAX_RANGE,
    MAX_RANGE + COLUMN_MULTIPLE,
    MAX_LONG_COLUMNS + COLUMN_MULTIPLE,
)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [*product(DTYPES, COLUMNS), *product(ALL_FORMATS, (2 * MAX_BLOCK_SIZE, MAX_RANGE + MAX_BLOCK_SIZE))],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_a_row_has_the_bits_of_one_alone(kind: Kind, columns: int) -> None:
    """Those of float32, however many rows there are, and whatever the others hold."""
    out_features = max(PANEL, BLOCK_OUT_FEATURES) + 2 * TILE_OUT_FEATURES + 3
    matrix, wide = stored(kind, out_features, columns)
    numbers = torch.randn(MAX_ROWS + GROUP + 1, columns)
    alone = torch.cat([compiled_linear(row, matrix) for row in numbers.split(1)])
    assert torch.equal(compiled_linear(numbers, wide), alone)
    for rows in (*range(2, MAX_REGISTER_ROWS + 2), MAX_REGISTER_ROWS + GROUP - 1, MAX_ROWS, len(numbers)):
        assert torch.equal(compiled_linear(numbers[:rows], matrix), alone[:rows])
        others = torch.full((rows, columns), float("nan"))
        others[rows // 2] = numbers[rows // 2]
        assert torch.equal(compiled_linear(others, matrix)[rows // 2], alone[rows // 2])


@pytest.mark.parametrize("gemm", [block_gemm, panel_gemm])
@pytest.mark.parametrize("columns", [COLUMN_MULTIPLE, MAX_RANGE + COLUMN_MULTIPLE])
@pytest.mark.each_value
def test_matmuls_for_other_processors_give_the_same_bits(columns: int, gemm: ModuleType) -> None:
    """This processor's ``multiply_many`` is one of the two."""
    numbers = torch.randn(MAX_ROWS + 20, columns)
    kernels = zeroed_records(KERNELS)[0]
    kernels.block_size, kernels.bytes, kernels.unpack = 1, 2, unpack_of(BFLOAT16).address
    if gemm is panel_gemm:
        kernels.unpack, kernels.expand = transpose_of(BFLOAT16).address, expand_of(BFLOAT16).address
    for out_features in (TILE_OUT_FEATURES, 3 * TILE_OUT_FEATURES, max(PANEL, BLOCK_OUT_FEATURES) + TILE_OUT_FEATURES):
        matrix = torch.randn(out_features, columns).bfloat16()
        alone = torch.cat([compiled_linear(row, matrix) for row in numbers.split(1)])
        for rows in (*range(1, GROUP + 2), 2 * GROUP + 1, MAX_ROWS, MAX_ROWS + 20):
            found, inputs = torch.full((rows + 1, out_features + 1), 7.0), numbers[:rows].clone()
            at = matrix.data_ptr(), out_features, columns, inputs.data_ptr(), rows, found.data_ptr()
            gemm.multiply_many(kernels, Operands(*at, out_features + 1))
            assert torch.equal(found[:rows, :out_features], alone[:rows])
            assert (found[rows] == 7).all() and (found[:, out_features] == 7).all(), (
                "nothing is written beside the outputs"
            )


@pytest.mark.parametrize(
    "numbers",
    [torch.randn(COLUMN_MULTIPLE, 3).t(), torch.randn(2, 5, COLUMN_MULTIPLE)[:, -1:]],
    ids=["transposed", "last rows"],
)
def test_rows_with_gaps_between_numbers_are_copied(numbers: torch.Tensor, compiled_rows: list[int]) -> None:
    layer = layer_of()
    with torch.inference_mode():
        assert torch.equal(layer(numbers), layer(numbers.clone(memory_format=torch.contiguous_format)))
    assert len(compiled_rows) == 2


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_dtype_does_not_matter(default: torch.dtype, compiled_rows: list[int]) -> None:
    layer, numbers = layer_of(), torch.randn(3, COLUMN_MULTIPLE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.inference_mode():
            found = layer(numbers)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, linear(numbers, layer.weight, layer.bias))
    assert compiled_rows[0] == 3


def test_layers_can_be_trained_and_converted(compiled_rows: list[int]) -> None:
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
    assert compiled_rows == []


def test_layers_compute_as_those_of_torch_under_autocast(compiled_rows: list[int]) -> None:
    layer, numbers = layer_of(), torch.randn(3, COLUMN_MULTIPLE)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found = layer(numbers)
        assert found.dtype == torch.bfloat16 and torch.equal(found, linear(numbers, layer.weight, layer.bias))
    assert compiled_rows == []


def test_unsupported_layers_are_not_replaced() -> None:
    odd, other = Linear(COLUMN_MULTIPLE + 1, 3), type("Other", (Linear,), {})(COLUMN_MULTIPLE, 3)
    transposed, half, fit = (Linear(COLUMN_MULTIPLE, COLUMN_MULTIPLE) for _ in range(3))
    transposed.weight.data = transposed.weight.data.t()
    half.to(torch.bfloat16)
    unsupported = [odd, other, transposed, half]
    model = torch.nn.ModuleList(unsupported)
    compile_linear_layers(model)
    assert not has_compiled_layers(model) and list(model) == unsupported
    model.append(fit)
    compile_linear_layers(model)
    assert [type(layer) for layer in model] == [*map(type, unsupported), CompiledLinear]


def test_a_replaced_layer_keeps_parameters_hooks_and_sharing() -> None:
    layer, called = Linear(COLUMN_MULTIPLE, 3).eval(), []
    layer.register_forward_hook(lambda *_: called.append(True))
    model: Any = torch.nn.ModuleDict({"one": layer, "two": torch.nn.Sequential(layer)})
    before = dict(model.named_parameters())
    compile_linear_layers(model)
    assert model.one is model.two[0] and isinstance(model.one, CompiledLinear) and not model.one.training
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    model.one(torch.ones(1, COLUMN_MULTIPLE))
    assert called == [True]


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(3, COLUMN_MULTIPLE), torch.ones(1)),
        (torch.ones(3, COLUMN_MULTIPLE), torch.arange(6.0)[::2]),
        (torch.arange(6.0 * COLUMN_MULTIPLE).view(3, -1)[:, ::2], torch.ones(3)),
    ],
    ids=["one bias", "bias with gaps", "weight with gaps"],
)
def test_parameters_that_were_replaced_are_read_as_torch_reads_them(weight: torch.Tensor, bias: torch.Tensor) -> None:
    layer = sharing(CompiledLinear, Linear(COLUMN_MULTIPLE, 3))
    layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    input = torch.rand(2, COLUMN_MULTIPLE)
    with torch.inference_mode():
        assert torch.equal(layer(input), linear(input, weight, bias))


@pytest.mark.parametrize("columns", [COLUMN_MULTIPLE, 3 * COLUMN_MULTIPLE])
@pytest.mark.parametrize("out_features", [3, 1])
def test_parameters_that_do_not_fit_are_refused_by_torch(columns: int, out_features: int) -> None:
    layer = sharing(CompiledLinear, Linear(2 * COLUMN_MULTIPLE, 3))
    layer.weight, layer.bias = torch.nn.Parameter(torch.ones(out_features, columns)), torch.nn.Parameter(torch.ones(2))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"size|shape"):
        layer(torch.rand(2, 2 * COLUMN_MULTIPLE))


def test_a_layer_may_be_traced_and_compiled_by_torch() -> None:
    layer, inputs = sharing(CompiledLinear, Linear(COLUMN_MULTIPLE, 3)), torch.rand(2, 5, COLUMN_MULTIPLE)
    with torch.no_grad():
        for made in (
            torch.jit.trace(layer, (inputs[0],)),
            torch.compile(layer, backend="eager", fullgraph=True),
        ):
            assert torch.equal(made(inputs[1]), linear(inputs[1], layer.weight, layer.bias))


def test_drafts_do_not_change_the_answer_of_a_model(compiled_rows: list[int]) -> None:
    stock, model = wide(), wide()
    compile_linear_layers(model)
    prompt = prompt_of(20)
    assert_same_logits(plain_logits(model, prompt), plain_logits(stock, prompt))
    assert_lossless(Target(model), prompt, expected=generated(stock, prompt, 32))
    assert {1, 20} < set(compiled_rows)


def test_one_copy_of_weights_serves_two_models() -> None:
    stock, model = wide(), wide()
    compile_linear_layers(model)
    share_weights(stock, model)
    shared = {name for name, weight in model.named_parameters() if weight.data_ptr() == _address(stock, name)}
    assert shared == {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, CompiledLinear)}
    assert not has_compiled_layers(stock)


def _address(model: Any, name: str) -> int:
    found: int = model.get_parameter(name).data_ptr()
    return found
