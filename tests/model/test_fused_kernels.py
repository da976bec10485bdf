"""The compiled operators of a decoder layer: right, and the same bits for a row wherever it stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.runtime.engines.cpu.attention import (
    BLOCK_QUERIES,
    MAX_BLOCK_QUERIES,
    attend,
    attention_scratch_size,
    query_blocks,
)
from hdtool.runtime.engines.cpu.layer_record import ATTENTION, PASS
from hdtool.runtime.kernels.compiled import zeroed_records
from hdtool.runtime.kernels.layer_norm import layer_norm_rows
from hdtool.runtime.kernels.row_operations import EXACT_GELU, SILU, TANH_GELU, activate, norm_rows
from hdtool.runtime.kernels.vector_code import LANES

HIDDEN = torch.finfo(torch.float32).min
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 4, 5, 8]))
"""Heads of keys, heads of queries for each, and the width of a head in vectors."""


def attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: int,
    mask: torch.Tensor | None,
    *,
    cap: float = 0.0,
    window: int = 0,
    places: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    together: int = BLOCK_QUERIES,
    turned: torch.Tensor | None = None,
    rotated_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """``queries`` are ``[rows, heads * groups, width]``, ``keys`` and ``values`` ``[heads, capacity, width]``.

    A single row has no mask.
    """
    rows, query_heads, width = queries.shape
    heads, capacity, _ = keys.shape
    found = torch.empty_like(queries)
    scratch = torch.empty(attention_scratch_size(positions, width, together)).fill_(float("nan"))
    pass_record, attention = zeroed_records(PASS)[0], zeroed_records(ATTENTION)[0]
    starts, offsets = np.array([positions - rows]), np.array([0, rows])
    pass_record.slots, pass_record.starts, pass_record.row_offsets = 1, starts.ctypes.data, offsets.ctypes.data
    pass_record.row_positions, pass_record.scale, pass_record.softcap = address_of(places), width**-0.5, cap
    pass_record.mask, pass_record.mask_row_stride = address_of(mask), 0 if mask is None else mask.stride(0)
    attention.heads, attention.groups, attention.width = heads, query_heads // heads, width
    attention.head_stride = capacity * width
    attention.window, attention.sinks = window, address_of(sinks)
    attention.cached_keys = keys.data_ptr()
    attention.cached_values = address_of(values if turned is None else rotated_keys)
    attention.latents.rotated = 0 if turned is None else turned.shape[2]
    blocks = heads * query_blocks(rows, query_heads // heads, together)
    addresses = queries.data_ptr(), address_of(turned), scratch.data_ptr(), found.data_ptr()
    attend(pass_record, attention, 0, *addresses, together, 0, blocks)
    return found


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def random_cache(heads: int, positions: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; those after the last position are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(2, heads, -(-positions // 64) * 64, width, generator=generator)
    cache[:, :, positions:] = float("nan")
    return cache[0], cache[1]


@given(SHAPES, st.integers(2, 70), st.integers(1, 200), st.integers(0, 1000))
def test_attention_is_that_of_torch(shape: tuple[int, int, int], rows: int, positions: int, seed: int) -> None:
    heads, groups, width = shape[0], shape[1], shape[2] * LANES
    keys, values = random_cache(heads, positions, width, seed)
    queries = torch.randn(rows, heads * groups, width)
    mask = torch.where(torch.rand(rows, positions) < 0.4, HIDDEN, torch.rand(rows, positions))
    mask[:, 0] = 0
    repeated, weighed = (one[:, :positions].double().repeat_interleave(groups, 0) for one in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.double().transpose(0, 1), repeated, weighed, attn_mask=mask.double()
    ).transpose(0, 1)
    assert (attended(queries, keys, values, positions, mask) - expected).abs().max() < 1e-5


@given(SHAPES, st.integers(1, 70), st.integers(1, 200), st.integers(0, 1000))
def test_attention_to_latents_is_that_of_torch(
    shape: tuple[int, int, int], rows: int, positions: int, seed: int
) -> None:
    """The latent vectors are keys and values; the keys have a second part of another width."""
    groups, width, rotated = shape[1], shape[2] * LANES, shape[0] * LANES
    latents, keys = random_cache(1, positions, width, seed)[0], random_cache(1, positions, rotated, seed)[1]
    queries, turned = torch.randn(rows, groups, width), torch.randn(rows, groups, rotated)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([queries, turned], dim=2).double().transpose(0, 1),
        torch.cat([latents, keys], dim=2)[:, :positions].double().expand(groups, -1, -1),
        latents[:, :positions].double().expand(groups, -1, -1),
        attn_mask=torch.ones(rows, positions, dtype=torch.bool).tril(positions - rows),
        scale=width**-0.5,
    ).transpose(0, 1)
    mask = torch.where(torch.ones(rows, positions).tril(positions - rows) > 0, 0.0, HIDDEN)
    found = attended(queries, latents, latents, positions, mask, turned=turned, rotated_keys=keys)
    assert (found - expected)[max(0, rows - positions) :].abs().max() < 1e-5


@given(SHAPES, st.integers(2, 40), st.integers(0, 150), st.integers(1, 180), st.integers(0, 1000))
def test_windows_bounds_and_sinks_are_those_of_torch(
    shape: tuple[int, int, int], rows: int, length: int, window: int, seed: int
) -> None:
    """Of a tree after a context, whose rows are at several depths."""
    heads, groups, width = shape[0], shape[1], shape[2] * LANES
    positions = length + rows
    keys, values = random_cache(heads, positions, width, seed)
    generator = torch.Generator().manual_seed(seed)
    queries, sinks = torch.randn(rows, heads * groups, width, generator=generator), torch.randn(heads * groups)
    depths = torch.randint(0, 9, (rows,), generator=generator)
    hidden = torch.rand(rows, positions, generator=generator) < 0.3
    own = torch.arange(rows)
    hidden[own, length + own] = False
    mask = torch.zeros(rows, positions).masked_fill_(hidden, HIDDEN)
    found = attended(
        queries, keys, values, positions, mask, cap=2.0, window=window, places=length + depths, sinks=sinks
    )

    of_columns = torch.cat((torch.arange(length), length + depths))
    hidden |= of_columns <= (length + depths)[:, None] - window
    repeated, weighed = (one[:, :positions].double().repeat_interleave(groups, 0) for one in (keys, values))
    scores = torch.einsum("rhw,hpw->hrp", queries.double(), repeated) * width**-0.5
    scores = (2.0 * (scores / 2.0).tanh()).masked_fill(hidden, float("-inf"))
    sink_weights = sinks.double()[:, None, None].expand(-1, rows, 1)
    weights = torch.cat((scores, sink_weights), dim=2).softmax(2)[..., :-1]
    assert (found - torch.einsum("hrp,hpw->rhw", weights, weighed)).abs().max() < 1e-5


@given(SHAPES, st.integers(2, 2 * BLOCK_QUERIES), st.integers(1, 150), st.integers(0, 1000), st.data())
def test_a_row_has_the_bits_that_it_has_alone(
    shape: tuple[int, int, int], rows: int, positions: int, seed: int, data: st.DataObject
) -> None:
    """Alone, a row sees its own positions without a mask, as a plain pass after the same tokens does."""
    heads, groups, width = shape[0], shape[1], shape[2] * LANES
    keys, values = random_cache(heads, positions, width, seed)
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(rows, heads * groups, width, generator=generator)
    shown = torch.rand(rows, positions, generator=generator) < data.draw(st.sampled_from([0.1, 0.5, 0.95]))
    shown[:, 0] = True
    mask = torch.zeros(rows, positions + 7)[:, :positions].masked_fill_(~shown, HIDDEN)
    together = data.draw(st.sampled_from([BLOCK_QUERIES, MAX_BLOCK_QUERIES]))
    found = attended(queries, keys, values, positions, mask, together=together)
    row = data.draw(st.integers(0, rows - 1))
    places = shown[row].nonzero()[:, 0]
    own_keys, own_values = torch.full((2, heads, -(-len(places) // 64) * 64, width), float("nan"))
    for one, all_of_them in ((own_keys, keys), (own_values, values)):
        one[:, : len(places)] = all_of_them[:, places]
    alone = attended(queries[row : row + 1].contiguous(), own_keys, own_values, len(places), None)
    assert torch.equal(found[row], alone[0])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 1e3]))
def test_norms_and_gated_units_are_those_of_torch_and_of_each_row(
    rows: int, vectors: int, seed: int, size: float
) -> None:
    width = vectors * LANES
    generator = torch.Generator().manual_seed(seed)
    numbers, weight, up = (torch.randn(rows, width, generator=generator) * size for _ in range(3))
    normed, alone = torch.empty_like(numbers), torch.empty(1, width)
    norm_rows(numbers.data_ptr(), rows, width, weight.data_ptr(), np.float32(0), np.float32(1e-5), normed.data_ptr())
    expected = torch.nn.functional.rms_norm(numbers, (width,), weight[0], 1e-5)
    assert torch.allclose(normed, expected, rtol=1e-5, atol=1e-7 * size)
    norm_rows(numbers[-1:].data_ptr(), 1, width, weight.data_ptr(), np.float32(0), np.float32(1e-5), alone.data_ptr())
    assert torch.equal(normed[-1], alone[0])
    gate = numbers.clone()
    activate(SILU, gate.data_ptr(), up.data_ptr(), gate.numel())
    assert torch.allclose(gate, torch.nn.functional.silu(numbers) * up, rtol=1e-5, atol=1e-30)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([-30.0, 0.0, 2.0]), st.booleans())
def test_layer_norms_are_those_of_torch_and_of_each_row(
    rows: int, vectors: int, seed: int, mean: float, has_weights: bool
) -> None:
    width = vectors * LANES
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, width, generator=generator) + mean
    weight, (bias,) = (torch.randn(count, width, generator=generator) for count in (rows if has_weights else 1, 1))
    normed, alone = torch.empty_like(numbers), torch.empty(1, width)
    stride, epsilon = width if has_weights else 0, np.float32(1e-5)
    addresses = weight.data_ptr(), stride, bias.data_ptr()
    layer_norm_rows(numbers.data_ptr(), rows, width, *addresses, epsilon, normed.data_ptr())
    expected = torch.nn.functional.layer_norm(numbers.double(), (width,), eps=1e-5) * weight + bias
    assert torch.allclose(normed.double(), expected, rtol=1e-4, atol=1e-4)
    last = weight[-1:].data_ptr(), 0, bias.data_ptr()
    layer_norm_rows(numbers[-1:].data_ptr(), 1, width, *last, epsilon, alone.data_ptr())
    assert torch.equal(normed[-1], alone[0])


@pytest.mark.parametrize(("approximate", "activation"), [("tanh", TANH_GELU), ("none", EXACT_GELU)])
def test_gelus_without_a_gate_are_those_of_torch(approximate: str, activation: int) -> None:
    for largest in (1e-3, 6, 60):
        numbers = torch.linspace(-largest, largest, 100 * LANES)
        expected = torch.nn.functional.gelu(numbers.double(), approximate=approximate)
        activate(activation, numbers.data_ptr(), 0, numbers.numel())
        assert torch.allclose(numbers.double(), expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none() -> None:
    """An overflow must show in the logits: the step is then computed without drafts."""
    keys, values = random_cache(1, 20, LANES, 0)
    queries = torch.randn(3, 1, LANES)
    queries[1] = float("nan")
    queries[2] = float("inf")
    found = attended(queries, keys, values, 20, torch.zeros(3, 20))
    assert found[0].isfinite().all() and found[1].isnan().all() and found[2].isnan().all()
    values[0, 3] = float("inf")
    assert not attended(queries, keys, values, 20, None)[0].isfinite().any()


@pytest.mark.parametrize("number", [-1e30, -90.0, -87.5, -1.0, 0.0, 1.0, 87.0, 1e30, float("nan"), float("-inf")])
def test_the_gate_of_large_numbers(number: float) -> None:
    gate, up = torch.full((LANES,), number), torch.ones(LANES)
    activate(SILU, gate.data_ptr(), up.data_ptr(), LANES)
    expected = torch.nn.functional.silu(torch.tensor(number))
    if expected.isnan():
        assert gate.isnan().all() or number == float("-inf")
    else:
        assert torch.allclose(gate, expected, rtol=1e-6, atol=1e-6)
