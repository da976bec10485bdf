"""Mixture-of-experts layers for CPUs; they read only the weights of experts to which a token is routed.

A token's expert outputs are added in expert order, so its result is bitwise independent of other tokens.
"""

from __future__ import annotations

from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch.nn import Module
from torch.nn.functional import silu

from hdtool.runtime.kernels.compact_weight import is_compact, stored_of
from hdtool.runtime.kernels.compiled import Array, array_at, bits, compiled, copy_floats, float_of
from hdtool.runtime.kernels.gemm import COLUMN_MULTIPLE, matmul_of
from hdtool.runtime.kernels.linear import ORDINARY_TENSORS, format_of
from hdtool.runtime.kernels.packed_matrix import PackedExperts
from hdtool.runtime.kernels.thread_pool import parallel_matmul, shared_thread_pool
from hdtool.runtime.kernels.vector_code import (
    ITEM_SIZE,
    add_in_place,
    gate_halves,
    gate_pairs,
    gelu_in_place,
    silu_in_place,
)

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

ROUTE, SCORES, OUTPUTS, INPUTS, BIAS, TOP_K, SIGMOID, RENORMALIZES, CORRECTION, GROUPS, USED_GROUPS = range(11)
"""Fields of a router record.

ROUTE, SCORES: addresses of the matmul that computes the scores and of its matrix, with OUTPUTS rows and INPUTS columns.
BIAS: address of the matmul's bias, or 0. TOP_K: experts per token. SIGMOID: routing weights are sigmoids of the scores
instead of a softmax. RENORMALIZES: a token's routing weights are scaled to sum to 1. CORRECTION: address of a term
added to routing weights only to choose experts, or 0. GROUPS, USED_GROUPS: number of expert groups, and of groups per
token.
"""
FACTOR, SUM_OFFSET, MIN_SUM, SHARED_GATE = range(USED_GROUPS + 1, USED_GROUPS + 5)
"""FACTOR, SUM_OFFSET, MIN_SUM: float32 bits of the factor applied to the final routing weights, of an offset added to
the sum they are divided by, and of that sum's minimum. SHARED_GATE: first of the fields, laid out like ROUTE to BIAS,
of a one-row matmul whose sigmoid weights the shared expert; zeros weight it by 1."""
ROUTER_FIELDS = SHARED_GATE + BIAS + 1


@compiled
def route(router: Array, scores: Array, chosen: Array, routing_weights: Array) -> None:
    """Write the top experts of each row to ``chosen``, best first, and their weights to ``routing_weights``.

    ``scores`` ``[rows, experts]`` are overwritten.
    """
    rows, top_k = chosen.shape
    factor = float_of(router, FACTOR)
    for row in range(rows):
        row_scores = scores[row]
        choices = row_scores.copy()
        _to_routing_weights(row_scores, router[SIGMOID] != 0)
        if router[CORRECTION]:
            correction = array_at(router[CORRECTION], (len(row_scores),), types.float32)
            for expert in range(len(row_scores)):
                choices[expert] = row_scores[expert] + correction[expert]
        if router[USED_GROUPS] < router[GROUPS]:
            _hide_groups(choices, router[GROUPS], router[USED_GROUPS])
        total = np.float32(0)
        for rank in range(top_k):
            best = np.argmax(choices)
            chosen[row, rank], routing_weights[row, rank] = best, row_scores[best]
            total += row_scores[best]
            choices[best] = -np.inf
        divisor = (
            max(total + float_of(router, SUM_OFFSET), float_of(router, MIN_SUM))
            if router[RENORMALIZES]
            else np.float32(1)
        )
        for rank in range(top_k):
            routing_weights[row, rank] = routing_weights[row, rank] / divisor * factor


@compiled
def _to_routing_weights(scores: Array, is_sigmoid: bool) -> None:
    if is_sigmoid:
        for expert in range(len(scores)):
            scores[expert] = np.float32(1) / (np.float32(1) + np.exp(-scores[expert]))
        return
    largest, total = scores.max(), np.float32(0)
    for expert in range(len(scores)):
        scores[expert] = np.exp(scores[expert] - largest)
        total += scores[expert]
    for expert in range(len(scores)):
        scores[expert] /= total


@compiled
def _hide_groups(choices: Array, groups: int, used: int) -> None:
    """Set scores outside the top ``used`` groups to -inf; groups are ranked by the sum of their two best scores."""
    size = len(choices) // groups
    best = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            if choices[expert] > first:
                first, second = choices[expert], first
            elif choices[expert] > second:
                second = choices[expert]
        best[group] = first + second
    is_used = np.zeros(groups, np.bool_)
    for _ in range(used):
        top_group = np.argmax(best)
        is_used[top_group], best[top_group] = True, -np.inf
    for group in range(groups):
        if not is_used[group]:
            choices[group * size : (group + 1) * size] = -np.inf


EXPERT_COUNT, WIDTH, INNER, EXPAND, GATE, GATE_SIZE, UP, UP_SIZE, EXPAND_BIAS = range(9)
"""Fields of an experts record. WIDTH, INNER: hidden and intermediate size. EXPAND: address of the gate and up matmul.
GATE, UP: addresses of the matrices; GATE_SIZE, UP_SIZE: their bytes per expert. EXPAND_BIAS: address of the matmul's
bias, or 0."""
REDUCE, DOWN, DOWN_SIZE, REDUCE_BIAS, PAIRS, ALPHA, LIMIT, TANH_GATE = range(9, 17)
"""REDUCE, DOWN: addresses of the down matmul and of its matrix. DOWN_SIZE: the matrix's bytes per expert. REDUCE_BIAS:
address of the matmul's bias, or 0. PAIRS: gate and up are interleaved in their bias and, if UP is 0, in one matrix;
ALPHA and LIMIT are then the float32 bits of the activation's constants. TANH_GATE: without PAIRS, the activation is
tanh GELU instead of SiLU."""
EXPERT_FIELDS = TANH_GATE + 1
IS_TANH_GELU = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True, "PytorchGELUTanh": True}
"""True for tanh GELU and False for SiLU, by the activation's class name."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the parameters ``[experts, rows, columns]`` in transformers' modules."""
BIASES = ("gate_up_proj_bias", "down_proj_bias")
PLAIN_EXPERTS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""Attributes of supported modules with separate gate and up halves."""
PAIRED_EXPERTS = {**PLAIN_EXPERTS, "has_bias": True, "is_transposed": True, "is_concatenated": False}
"""Attributes of supported modules with interleaved gate and up rows, transposed matrices and biases."""
TOLERANCE = 1e-4
CHECKED_EXPERTS = 2
"""Number of experts whose outputs are compared with transformers'."""
CHECKED_MAGNITUDES = (1.0, 100.0)
"""Scales of the inputs on which experts are compared; large inputs reach the clamping limits of the activation."""


@compiled
def experts_scratch_size(experts: Array, rows: int) -> int:
    """Return the size of the scratch memory that ``mix_experts`` needs, in float32 numbers."""
    return 2 * rows * (experts[WIDTH] + experts[INNER])  # type: ignore[no-any-return]


@compiled
def mix_experts(
    thread_pool: int,
    threads: int,
    experts: Array,
    chosen: Array,
    routing_weights: Array,
    inputs: int,
    outputs: int,
    scratch: int,
) -> int:
    """Write each row's weighted sum of expert outputs; return the number of distinct experts used.

    ``chosen`` and ``routing_weights`` ``[rows, top_k]`` are each row's experts and their weights. ``inputs`` and
    ``outputs`` are addresses of float32 rows.
    """
    rows, top_k = chosen.shape
    width, inner = experts[WIDTH], experts[INNER]
    array_at(outputs, (rows * width,), types.float32)[:] = 0
    gathered, gate = scratch, scratch + rows * width * ITEM_SIZE
    products = gate + 2 * rows * inner * ITEM_SIZE
    order = np.argsort(chosen.ravel(), kind="mergesort")
    first = active_experts = 0
    while first < rows * top_k:
        expert = chosen[order[first] // top_k, order[first] % top_k]
        end = first
        while end < rows * top_k and chosen[order[end] // top_k, order[end] % top_k] == expert:
            row = order[end] // top_k
            copy_floats(inputs + row * width * ITEM_SIZE, width, gathered + (end - first) * width * ITEM_SIZE)
            end += 1
        count = end - first
        _expand(thread_pool, threads, experts, expert, gathered, count, gate)
        matrix = experts[DOWN] + expert * experts[DOWN_SIZE]
        bias = experts[REDUCE_BIAS] + expert * width * ITEM_SIZE if experts[REDUCE_BIAS] else 0
        parallel_matmul(thread_pool, threads, experts[REDUCE], matrix, width, inner, gate, count, products, bias)
        for pair in range(first, end):
            row, product = order[pair] // top_k, products + (pair - first) * width * ITEM_SIZE
            add_in_place(outputs + row * width * ITEM_SIZE, product, width, routing_weights[row, order[pair] % top_k])
        first, active_experts = end, active_experts + 1
    return active_experts


@compiled
def _expand(thread_pool: int, threads: int, experts: Array, expert: int, inputs: int, rows: int, gate: int) -> None:
    """Write ``act(gate) * up`` of one expert to ``gate``, which must have room for both projections of all rows."""
    width, inner = experts[WIDTH], experts[INNER]
    matrix, up_matrix = experts[GATE] + expert * experts[GATE_SIZE], experts[UP] + expert * experts[UP_SIZE]
    bias = experts[EXPAND_BIAS] + 2 * expert * inner * ITEM_SIZE if experts[EXPAND_BIAS] else 0
    alpha, limit = float_of(experts, ALPHA), float_of(experts, LIMIT)
    if experts[PAIRS] and not experts[UP]:
        parallel_matmul(thread_pool, threads, experts[EXPAND], matrix, 2 * inner, width, inputs, rows, gate, bias)
        gate_pairs(gate, rows * inner, alpha, limit, gate)
        return
    up = gate + rows * inner * ITEM_SIZE
    parallel_matmul(thread_pool, threads, experts[EXPAND], matrix, inner, width, inputs, rows, gate, 0)
    parallel_matmul(thread_pool, threads, experts[EXPAND], up_matrix, inner, width, inputs, rows, up, 0)
    if experts[PAIRS]:
        for row in range(rows):
            first = row * inner * ITEM_SIZE
            gate_halves(gate + first, up + first, bias, inner, alpha, limit)
    elif experts[TANH_GATE]:
        gelu_in_place(gate, up, rows * inner)
    else:
        silu_in_place(gate, up, rows * inner)


def matrices_of(weight: Any) -> Any:
    """Return a view of a parameter as contiguous ``[experts, rows, columns]``; some modules store the transpose."""
    return weight if weight.is_contiguous() else weight.transpose(1, 2)


class ExpertMatrices(NamedTuple):
    """Location of all experts' matrices in memory, and the matmul that reads them."""

    matmul: int
    """Address of the compiled matmul."""
    first: int
    """Address of the first expert's matrix."""
    size: int
    """Stride between experts in bytes."""


def expert_matrices(weight: Any, panels: Mapping[int, Any]) -> list[ExpertMatrices]:
    """Return the location of a parameter's matrices, or two locations if gate and up are packed separately.

    ``panels`` maps addresses of packed parts to repacked copies, whose addresses are returned instead.
    """
    stored = matrices_of(stored_of(weight))
    parts = stored.parts if isinstance(stored, PackedExperts) else [stored]
    matrices = []
    for part in parts:
        panel = panels.get(part.data_ptr())
        matmul = panel.matmul if panel else matmul_of(*format_of(part)).address
        memory, size = (panel.data_ptr(), panel.nbytes) if panel else (part.data_ptr(), part.nbytes)
        matrices.append(ExpertMatrices(matmul, memory, size // len(stored)))
    return matrices


def experts_record(module: Any, panels: Mapping[int, Any] = MappingProxyType({})) -> Array:
    """Return the record that describes a layer's experts to compiled code; for ``panels``, see ``expert_matrices``."""
    record = np.zeros(EXPERT_FIELDS, np.int64)
    (gate, *separate_up), (down,) = (expert_matrices(getattr(module, name), panels) for name in WEIGHTS)
    record[: INNER + 1] = matrices_of(module.down_proj).shape
    record[EXPAND : GATE_SIZE + 1] = gate
    if separate_up or not _has_pairs(module):
        up = separate_up[0] if separate_up else gate._replace(first=gate.first + gate.size // 2)
        record[UP : UP_SIZE + 1] = up.first, up.size
    record[REDUCE : DOWN_SIZE + 1] = down
    if _has_pairs(module):
        record[EXPAND_BIAS], record[REDUCE_BIAS] = (getattr(module, name).data_ptr() for name in BIASES)
        record[PAIRS : LIMIT + 1] = 1, bits(module.alpha), bits(module.limit)
    else:
        record[TANH_GATE] = bool(_has_gelu(module))
    return record


def _has_pairs(module: Any) -> bool:
    return not getattr(module, "is_concatenated", True)


class CompiledExperts(Module):
    """Compiled experts that share another module's parameters and fall back to that module's ``forward``."""

    @classmethod
    def of(cls, experts: Module) -> CompiledExperts:
        compiled = cls.__new__(cls)
        compiled.__dict__ = {**experts.__dict__, "_usual": type(experts)}
        return compiled

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        if not self.takes(hidden):
            fallback: torch.Tensor = self.__dict__["_usual"].forward(self, hidden, chosen, routing_weights)
            return fallback
        inputs, rows = hidden.contiguous(), len(hidden)
        record, outputs = experts_record(self), torch.empty_like(inputs)
        scratch = inputs.new_empty(experts_scratch_size(record, rows))
        threads = torch.get_num_threads()
        routing = chosen.numpy(), routing_weights.float().numpy()
        addresses = inputs.data_ptr(), outputs.data_ptr(), scratch.data_ptr()
        with shared_thread_pool(threads).open() as thread_pool:
            mix_experts(thread_pool, threads, record, *routing, *addresses)
        return outputs

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Delegate to the original class, because its ``forward``, the fallback, calls ``self._apply_gate``."""
        gated: torch.Tensor = self.__dict__["_usual"]._apply_gate(self, gate_up)
        return gated

    def takes(self, hidden: torch.Tensor) -> bool:
        return (
            not (torch.compiler.is_compiling() or torch._C._get_tracing_state())
            and hidden.is_cpu
            and hidden.dtype == torch.float32
            and hidden.dim() == 2
            and fits_compiled_experts(self)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def fits_compiled_experts(module: Any, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Return True if the compiled code supports these experts, and if their weights have one of ``dtypes``."""
    expected = PAIRED_EXPERTS if _has_pairs(module) else PLAIN_EXPERTS
    names = WEIGHTS + BIASES if expected["has_bias"] else WEIGHTS
    weights: list[Any] = [module._parameters.get(name) for name in WEIGHTS]
    if set(module._parameters) != set(names) or any(weight is None or weight.dim() != 3 for weight in weights):
        return False
    if not all(getattr(module, name, value) is value for name, value in expected.items()):
        return False
    expand, reduce = (weight.transpose(1, 2) if expected["is_transposed"] else weight for weight in weights)
    number, width, inner = reduce.shape
    return (
        all(_parts_fit(weight, _has_pairs(module)) for weight in weights)
        and (_pairs_fit(module, dtypes) if expected["has_bias"] else _has_gelu(module) is not None)
        and expand.shape == (number, 2 * inner, width)
        and all(weight.shape[2] % COLUMN_MULTIPLE == 0 and _is_plain(weight, dtypes) for weight in (expand, reduce))
    )


def _parts_fit(weight: Any, has_pairs: bool) -> bool:
    """Return True if a weight isn't packed, or is packed as one part or as two (gate and up) of equal format and shape.

    The rows of two parts must be interleaved if the module has interleaved gate and up rows, and only then.
    """
    stored = stored_of(weight)
    if not isinstance(stored, PackedExperts):
        return not is_compact(weight) or isinstance(stored, torch.Tensor)
    forms = {(part.format, part.shape) for part in stored.parts}
    number = len(stored.parts)
    return len(forms) == 1 and (number == 1 or (number == 2 and stored.is_interleaved == has_pairs))


def _has_gelu(module: Any) -> bool | None:
    """Return True if the activation is tanh GELU, False for SiLU and None for any other."""
    if not module._modules:
        return False if getattr(module, "act_fn", None) is silu else None
    return IS_TANH_GELU.get(type(module.act_fn).__name__) if set(module._modules) == {"act_fn"} else None


def _pairs_fit(module: Any, dtypes: Container[torch.dtype]) -> bool:
    """Return True if experts with interleaved gate and up have the constants and biases that compiled code needs."""
    biases = [module._parameters[name] for name in BIASES]
    shapes = [matrices_of(module._parameters[name]).shape[:2] for name in WEIGHTS]
    return (
        not module._modules
        and all(isinstance(getattr(module, name, None), float) for name in ("alpha", "limit"))
        and all(type(bias) in ORDINARY_TENSORS and _is_plain(bias, dtypes) for bias in biases)
        and [bias.shape for bias in biases] == shapes
    )


def _is_plain(weight: Any, dtypes: Container[torch.dtype]) -> bool:
    is_ordinary = type(weight) in ORDINARY_TENSORS or is_compact(weight)
    return is_ordinary and weight.dtype in dtypes and weight.is_cpu and weight.is_contiguous()


def arrange_experts(model: Module) -> None:
    """Rearrange transposed expert matrices in memory into the order in which the matmul reads them.

    Shapes and values are unchanged; strides change.
    """
    for module in model.modules():
        if not getattr(module, "is_transposed", False) or not _has_pairs(module):
            continue
        for name in WEIGHTS:
            weight = module._parameters.get(name)
            if weight is not None and type(weight) in ORDINARY_TENSORS and weight.dim() == 3 and weight.is_contiguous():
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def compile_experts(model: Module) -> None:
    """Replace a model's experts in place with ``CompiledExperts`` if their outputs match; parameters are shared."""
    arrange_experts(model)
    same: dict[type, bool] = {}
    for module in list(model.modules()):
        experts = module._modules.get("experts")
        if experts is None or not fits_compiled_experts(experts):
            continue
        kind = type(experts)
        if kind not in same:
            same[kind] = _has_same_outputs(experts)
        if same[kind]:
            module._modules["experts"] = CompiledExperts.of(experts)


@torch.inference_mode()
def _has_same_outputs(experts: Any) -> bool:
    """Return True if compiled code gives the same outputs as transformers' module for ``CHECKED_EXPERTS`` experts."""
    counters = [weight.expansions for weight in experts.parameters() if is_compact(weight)]
    counts_before = [counter.count for counter in counters]
    try:
        return all(_is_same(_first_experts(experts), size) for size in CHECKED_MAGNITUDES)
    except Exception:  # for example, if ``forward`` takes other arguments
        return False
    finally:
        for counter, count in zip(counters, counts_before, strict=True):
            counter.count = count


def _first_experts(experts: Any) -> Any:
    """Return a copy of the module with its first ``CHECKED_EXPERTS`` experts: transformers may expand all of them."""
    subset = copy(experts)
    subset._parameters = {name: weight[:CHECKED_EXPERTS] for name, weight in experts._parameters.items()}
    subset.num_experts = min(CHECKED_EXPERTS, experts.num_experts)
    return subset


def _is_same(experts: Any, size: float) -> bool:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, matrices_of(experts.down_proj).shape[1], generator=random) * size
    chosen, routing_weights = torch.tensor([[0], [experts.num_experts - 1], [0]]), torch.tensor([[1.0], [0.5], [2.0]])
    expected = experts(hidden, chosen, routing_weights)
    actual = CompiledExperts.of(experts)(hidden, chosen, routing_weights)
    return actual.shape == expected.shape and torch.allclose(actual, expected, TOLERANCE, TOLERANCE * expected.std())


def compile_mixing() -> None:
    """Call ``mix_experts`` with zero rows to compile it, so that the first pass doesn't wait for compilation."""
    record, none = np.zeros(EXPERT_FIELDS, np.int64), np.zeros((0, 1), np.int64)
    experts_scratch_size(record, 0)
    mix_experts(0, 1, record, none, np.zeros((0, 1), np.float32), 0, 0, 0)
