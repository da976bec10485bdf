"""Kernels of mixers on CUDA: on a CPU by Triton's interpreter, and compiled ahead for GPUs that are not here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Conv1d, Module, Parameter
from torch.nn.functional import silu, softplus

from hdtool.runtime.caches.recurrent_states import CONV, RECURRENT, StateName
from hdtool.runtime.engines.reference.mixer_operations import DeltaInputs, MixerOperations
from hdtool.runtime.engines.reference.tree_indices import TreeIndices
from hdtool.runtime.engines.reference.tree_recurrences import MixerStates
from hdtool.runtime.model.pass_inputs import StepTensors
from hdtool.runtime.program.mixer_parts import DELTA_RULE, MAMBA2, SHORT_CONVOLUTION, MixerParts
from tests.support.compiled_kernels import SHARED_MEMORY, compiled
from tests.support.described import model_of
from tests.support.interpreted import interpreted_kernels
from tests.support.trees import step_of

CONVOLUTION, RECURRENCE = StateName(0, CONV, 0), StateName(0, RECURRENT, 0)
LENGTHS = [5, 40, 9]
ROWS = 1, 8, 33, 65
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    with interpreted_kernels():
        yield


def both() -> list[MixerOperations]:
    from hdtool.runtime.engines.cuda.triton_mixers import TritonMixers

    return [MixerOperations(), TritonMixers()]


def paths(step: StepTensors, slot: int) -> list[list[int]]:
    """The rows from the root to each row of a slot's tree, without padding."""
    bits = [int(each) for each in step.ancestor_mask[slot]]
    rows = [0, *(row for row in range(1, len(bits)) if bits[row])]
    return [[0, *(node + 1 for node in range(64) if bits[row] >> node & 1)] for row in rows]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def shown(operations: MixerOperations, paths: list[list[int]], slot: int) -> list[list[int]]:
    """All paths, or, of kernels, which the interpreter runs slowly, another one in each slot."""
    if type(operations) is MixerOperations:
        return paths
    return [(max(paths, key=len), paths[len(paths) // 2], paths[0])[slot]]


def written(operations: MixerOperations, change: Any, slot: int, path: list[int], before: torch.Tensor) -> torch.Tensor:
    """Return a slot's state after a path, which is written in the second of two layers; no other state may change."""
    states = torch.stack([before + 1, before])
    stacked = type(change)(*(torch.stack([torch.zeros_like(part), part]) for part in change))
    with torch.inference_mode():
        operations.write(stacked, slot, path, states[:, slot])
    others = [other for other in range(len(before)) if other != slot]
    assert torch.equal(states[:, others], torch.stack([before + 1, before])[:, others])
    return states[1, slot]


def parameters_of(heads: int, *names: str) -> Any:
    module = Module()
    for name in names:
        module.register_parameter(name, Parameter(torch.randn(heads)))
    return module


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("taps", "before", "activates"), [(4, 4, True), (3, 3, False), (4, 3, True)])
@pytest.mark.each_value
def test_a_convolution_reads_the_last_ancestors(
    rows: int, taps: int, before: int, activates: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    step, width, slots = step_of(rows, LENGTHS), 600, len(LENGTHS)
    convolution = Conv1d(width, width, taps, groups=width, bias=activates, padding=taps - 1).to(dtype)
    parts: Any = MixerParts(SHORT_CONVOLUTION, Module(), (), Module(), convolution)
    wide = torch.randn(slots, rows, width + 7).to(dtype)
    inputs, state = wide[..., 3 : 3 + width], torch.randn(slots, width, before).to(dtype)
    weight = convolution.weight.detach().double()[:, 0]
    for operations in both():
        states = MixerStates({CONVOLUTION: state}, TreeIndices(step))
        with torch.inference_mode():
            found = operations.convolve(parts, inputs, states, activates=activates)
        for slot in range(slots):
            for path in shown(operations, paths(step, slot), slot):
                read = torch.cat([state[slot].double(), inputs[slot, path].double().T], 1)
                exact = (read[:, -taps:] * weight).sum(1)
                if convolution.bias is not None:
                    exact += convolution.bias.detach().double()
                assert_near(found[slot, path[-1]], silu(exact) if activates else exact, dtype)
                after = written(operations, states.changes[CONVOLUTION], slot, path, state)
                assert torch.equal(after, read[:, -before:].to(dtype))


def assert_recurs(
    operations: MixerOperations,
    states: MixerStates,
    found: torch.Tensor,
    exact: Any,
    before: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """``exact`` returns the output of a path's last row and the state after it, computed token by token in float64."""
    step = states.indices.step
    for slot in range(len(LENGTHS)):
        for path in shown(operations, paths(step, slot), slot):
            output, after = exact(slot, path)
            assert_near(found[slot, path[-1]], output.flatten(), dtype)
            assert_near(written(operations, states.changes[RECURRENCE], slot, path, before), after, dtype)


SHAPES = pytest.mark.parametrize(
    ("key_heads", "heads", "width", "values"), [(2, 4, 24, 40), (1, 3, 16, 16), (2, 2, 64, 8)]
)


@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.each_value
def test_a_delta_rule_reads_the_state_of_each_rows_parent(
    rows: int, key_heads: int, heads: int, width: int, values: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows + heads)
    step, slots, module = step_of(rows, LENGTHS), len(LENGTHS), parameters_of(heads, "A_log", "dt_bias")
    parts: Any = MixerParts(
        DELTA_RULE, module, (), Module(), Conv1d(1, 1, 1), None, key_heads, heads, width, values, 2.0
    )  # fmt: skip
    convolved = torch.randn(slots, rows, 2 * key_heads * width + heads * values).to(dtype)
    narrow = torch.randn(slots, rows, 2 * heads).to(dtype)
    inputs = DeltaInputs(convolved, convolved, *narrow.chunk(2, -1))
    before = torch.randn(slots, heads, width, values)
    parts_of = convolved.double().split([key_heads * width, key_heads * width, heads * values], -1)
    q, k = (part.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, -2) for part in parts_of[:2])
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    v = parts_of[2].unflatten(-1, (heads, -1))
    strength = 2 * inputs.strength.sigmoid().double()
    decay = -module.A_log.double().exp() * softplus(inputs.step.double() + module.dt_bias.double())

    def exact(slot: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        state = before[slot].double()
        for row in path:
            state = state * decay[slot, row].exp()[:, None, None]
            held = (k[slot, row][..., None] * state).sum(1)
            change = strength[slot, row][:, None] * (v[slot, row] - held)
            state = state + k[slot, row][..., None] * change[:, None]
        return width**-0.5 * (q[slot, path[-1]][..., None] * state).sum(1), state

    for operations in both():
        states = MixerStates({RECURRENCE: before}, TreeIndices(step))
        with torch.inference_mode():
            found = operations.delta_rule(parts, convolved, inputs, states)
        assert_recurs(operations, states, found, exact, before, dtype)


@DTYPES
@SHAPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.each_value
def test_a_scan_reads_the_state_of_each_rows_parent(
    rows: int, key_heads: int, heads: int, width: int, values: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows + heads)
    step, slots, module = step_of(rows, LENGTHS), len(LENGTHS), parameters_of(heads, "A_log", "dt_bias", "D")
    parts: Any = MixerParts(MAMBA2, module, (), Module(), Conv1d(1, 1, 1), None, key_heads, heads, width, values)
    convolved = torch.randn(slots, rows, 2 * key_heads * width + heads * values).to(dtype)
    steps = torch.randn(slots, rows, heads + 3).to(dtype)[..., 3:]
    before = torch.randn(slots, heads, values, width)
    value, *others = convolved.double().split([heads * values, key_heads * width, key_heads * width], -1)
    v = value.unflatten(-1, (heads, -1))
    k, q = (part.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, -2) for part in others)
    time = softplus(steps + module.dt_bias.to(dtype)).double()
    decay = -module.A_log.double().exp() * time

    def exact(slot: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        state = before[slot].double()
        for row in path:
            written = time[slot, row][:, None] * v[slot, row]
            state = state * decay[slot, row].exp()[:, None, None] + written[..., None] * k[slot, row][:, None]
        skipped = module.D.double()[:, None] * v[slot, path[-1]]
        return (state * q[slot, path[-1]][:, None]).sum(2) + skipped, state

    for operations in both():
        states = MixerStates({RECURRENCE: before}, TreeIndices(step))
        with torch.inference_mode():
            found = operations.scan(parts, convolved, steps, states)
        assert_recurs(operations, states, found, exact, before, dtype)


def test_keys_that_repeat_lose_no_precision() -> None:
    """Powers of the system of a path with equal keys would exceed float32's precision."""
    rows, module = 64, parameters_of(1, "A_log", "dt_bias")
    step = step_of(rows, [7])
    step.ancestor_mask[0] = torch.tensor([(1 << row) - 1 if row < 64 else -1 for row in range(rows)])
    module.A_log.data.fill_(-20.0)
    parts: Any = MixerParts(DELTA_RULE, module, (), Module(), Conv1d(1, 1, 1), None, 1, 1, 16, 16)
    convolved = torch.cat([torch.ones(1, rows, 32), torch.randn(1, rows, 16)], -1)
    inputs = DeltaInputs(convolved, convolved, torch.full((1, rows, 1), 9.0), torch.zeros(1, rows, 1))
    before = torch.zeros(1, 1, 16, 16)
    for operations in both():
        with torch.inference_mode():
            states = MixerStates({RECURRENCE: before}, TreeIndices(step))
            found = operations.delta_rule(parts, convolved, inputs, states)
        torch.testing.assert_close(found[0] * 16**0.5, convolved[0, :, 32:], rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "kimi_linear", "nemotron_h", "falcon_h1, norms", "falcon_h1, norms before gates"]
)
def test_gated_norms_round_where_those_of_the_library_do(name: str) -> None:
    """In float16: Triton's interpreter cuts numbers to bfloat16, where GPUs round them."""
    from hdtool.runtime.engines.stock.recurrent_layers import ANY
    from hdtool.runtime.program.mixer_parts import mixer_parts

    torch.manual_seed(0)
    model = copy.deepcopy(model_of(name)).half()
    found = (mixer_parts(module, getattr(module, "layer_idx", None) or 0, ANY) for module in model.modules())
    parts = next(each for each in found if each and each.norm)
    norm: Any = parts.norm
    norm.weight.data = torch.randn_like(norm.weight)
    values = parts.heads * parts.value_width
    output, wide = torch.randn(2, 60, values).half(), torch.randn(2, 60, values + 5).half()
    with torch.inference_mode():
        expected, actual = (each.gated_norm(parts, output, wide[..., 5:]) for each in both())
    assert (actual != expected).float().mean() < 0.01


MIXERS = """
for name, precision in (("bf16", "tf32x3"), ("fp32", "ieee")):
    for kernel, constants in ((mixer_kernels.delta_rule_kernel, dict(FACTOR=1.0)), (mixer_kernels.scan_kernel, {})):
        for rows in (16, 32, 64):
            kinds = {one: "*" + name for one in kernel.arg_names[: kernel.arg_names.index("left")]}
            kinds |= dict.fromkeys(("state", "left", "right", "totals"), "*fp32") | {"ancestors": "*i64"}
            constants |= dict(WIDTH=128, CHUNK=16, VALUES=128, BLOCK=32, ROWS=rows, PRECISION=precision)
            case = f"{kernel.__name__}-{name}-{rows}"
            compiled(case, kernel, kinds, constants, 8 if rows == 64 else 4, 1)
    kinds = dict.fromkeys(("inputs", "state", "weight", "bias", "columns", "convolved"), "*" + name)
    constants = dict(BEFORE=4, TAPS=4, BIAS=True, ACTIVATES=True, BLOCK=512)
    compiled(f"convolve-{name}", mixer_kernels.convolve_kernel, kinds | {"ancestors": "*i64"}, constants, 4)
    kinds = dict.fromkeys(("output", "gate", "weight", "mixed"), "*" + name) | {"epsilon": "fp32"}
    for block, warps in ((128, 1), (4096, 4)):
        constants = dict(WEIGHTS=warps > 1, FIRST=warps > 1, ACTIVATION="silu", ROUNDS=True, BLOCK=block)
        compiled(f"gated-norm-{name}-{block}", mixer_kernels.gated_norm_kernel, kinds, constants, warps)
    kinds = dict.fromkeys(("columns", "state"), "*" + name)
    compiled(f"columns-{name}", mixer_kernels.write_columns_kernel, kinds, dict(BEFORE=4, BLOCK=512), 4)
    kinds = dict.fromkeys(("left", "right", "totals"), "*fp32") | {"state": "*" + name}
    for width, decays in ((128, 1), (128, 128), (256, 1)):
        constants = dict(WIDTH=width, LOADED=width, DECAYS=decays, VALUES=128, BLOCK=32)
        compiled(f"updates-{name}-{width}-{decays}", mixer_kernels.write_updates_kernel, kinds, constants, 4)
"""


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=pytest.mark.long if each == 90 else pytest.mark.exhaustive) for each in SHARED_MEMORY],
)
def test_mixers_compile_without_spills(capability: int, tmp_path: Path) -> None:
    cases = compiled(MIXERS, capability, (), tmp_path)
    assert len(cases) == 26
    for case, found in cases.items():
        assert not found.spilled and found.shared <= SHARED_MEMORY[capability] * 1024, (case, found)
