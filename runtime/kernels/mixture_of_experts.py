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

from hdtool.runtime.kernels.compact_weight import is_compact, sharing, stored_of
from hdtool.runtime.kernels.compiled import Array, Record, array_at, compiled, copy_floats
from hdtool.runtime.kernels.linear_layers import ORDINARY_TENSORS, format_of, is_readable
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE, MATMUL, matmul_of
from hdtool.runtime.kernels.packed_matrix import PackedExperts
from hdtool.runtime.kernels.row_operations import (
    SILU,
    SQUARED_RELU,
    TANH_GELU,
    activate,
    add_in_place,
    gate_halves,
    gate_pairs,
)
from hdtool.runtime.kernels.thread_pool import parallel_matmul, shared_thread_pool
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

ROUTER = np.dtype(
    [
        ("scores", MATMUL),
        ("top_k", np.int64),  # experts per token
        ("has_sigmoids", np.bool_),  # True if routing weights are sigmoids of the scores instead of a softmax
        ("renormalizes", np.bool_),  # True if a token's routing weights are scaled to sum to 1
        ("correction", np.int64),  # address of a term added to routing weights only to choose experts, or 0
        ("groups", np.int64),  # number of expert groups
        ("used_groups", np.int64),  # number of expert groups per token
        ("group_top", np.int64),  # 1 to rank groups by their best score, 2 by the sum of their two best scores
        ("factor", np.float32),  # applied to the final routing weights
        ("sum_offset", np.float32),  # added to the sum by which routing weights are divided
        ("min_sum", np.float32),  # minimum of this sum
        ("shared_gate", MATMUL),  # its one row gives the sigmoid that weights the shared expert; none for a weight of 1
    ],
    align=True,
)


@compiled
def route(router: Record, scores: Array, chosen: Array, routing_weights: Array) -> None:
    """Write the top experts of each row to ``chosen``, best first, and their weights to ``routing_weights``.

    ``scores`` ``[rows, experts]`` are overwritten.
    """
    rows, top_k = chosen.shape
    factor = router.factor
    for row in range(rows):
        row_scores = scores[row]
        choices = row_scores.copy()
        _to_routing_weights(row_scores, router.has_sigmoids)
        if router.correction:
            correction = array_at(router.correction, (len(row_scores),), types.float32)
            for expert in range(len(row_scores)):
                choices[expert] = row_scores[expert] + correction[expert]
        if router.used_groups < router.groups:
            _hide_groups(choices, router.groups, router.used_groups, router.group_top)
        total = np.float32(0)
        for rank in range(top_k):
            best = np.argmax(choices)
            chosen[row, rank], routing_weights[row, rank] = best, row_scores[best]
            total += row_scores[best]
            choices[best] = -np.inf
        divisor = max(total + router.sum_offset, router.min_sum) if router.renormalizes else np.float32(1)
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
def _hide_groups(choices: Array, groups: int, used: int, top: int) -> None:
    """Rank groups by the sum of their ``top`` (1 or 2) best scores; set scores outside the best ``used`` to -inf."""
    size = len(choices) // groups
    best = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            if choices[expert] > first:
                first, second = choices[expert], first
            elif choices[expert] > second:
                second = choices[expert]
        best[group] = first + second if top > 1 else first
    is_used = np.zeros(groups, np.bool_)
    for _ in range(used):
        top_group = np.argmax(best)
        is_used[top_group], best[top_group] = True, -np.inf
    for group in range(groups):
        if not is_used[group]:
            choices[group * size : (group + 1) * size] = -np.inf


EXPERTS = np.dtype(
    [
        ("count", np.int64),
        ("width", np.int64),  # hidden size
        ("inner", np.int64),  # intermediate size
        ("expand", np.int64),  # address of the gate and up matmul's kernels
        ("gate", np.int64),  # address of the first expert's matrix
        ("gate_size", np.int64),  # bytes per expert
        ("up", np.int64),  # address of the first expert's matrix; 0 if interleaved with the gate, or without gates
        ("up_size", np.int64),
        ("expand_bias", np.int64),  # address, 0 for none
        ("reduce", np.int64),  # address of the down matmul's kernels
        ("down", np.int64),  # address of the first expert's matrix
        ("down_size", np.int64),
        ("reduce_bias", np.int64),  # address, 0 for none
        ("has_pairs", np.bool_),  # True if gate and up are interleaved in their bias
        ("alpha", np.float32),  # constants of the activation with ``has_pairs``
        ("limit", np.float32),
        ("activation", np.int64),  # without ``has_pairs``, see ``row_operations.ACTIVATIONS``
    ],
    align=True,
)
ACTIVATIONS = {
    False: {"ReLUSquaredActivation": SQUARED_RELU},
    True: {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": TANH_GELU, "PytorchGELUTanh": TANH_GELU},
}
"""Supported activations, by class name, of experts without and with a gate."""
GATE_UP, UP, DOWN = WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the parameters ``[experts, rows, columns]`` in transformers' modules; experts without a gate have ``UP``."""
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
UNGATED_EXPERTS = {**PLAIN_EXPERTS, "has_gate": False}
"""Attributes of supported modules without a gate."""
PAIRED_EXPERTS = {**PLAIN_EXPERTS, "has_bias": True, "is_transposed": True, "is_concatenated": False}
"""Attributes of supported modules with interleaved gate and up rows, transposed matrices and biases."""
TOLERANCE = 1e-4
CHECKED_EXPERTS = 2
"""Number of experts whose outputs are compared with transformers'."""
CHECKED_MAGNITUDES = (1.0, 100.0)
"""Scales of the inputs on which experts are compared; large inputs reach the clamping limits of the activation."""


def experts_scratch_size(experts: Record, rows: int) -> int:
    """Return the size of the scratch memory that ``mix_experts`` needs, in float32 numbers."""
    return int(2 * rows * (experts["width"] + experts["inner"]))


@compiled
def mix_experts(
    thread_pool: int,
    threads: int,
    experts: Record,
    chosen: Array,
    routing_weights: Array,
    inputs: int,
    outputs: int,
    scratch: int,
) -> int:
    """Write each row's weighted sum of expert outputs; return the number of distinct experts used.

    ``chosen`` and ``routing_weights`` ``[rows, top_k]`` are each row's experts and their weights. ``inputs`` and
    ``outputs`` are addresses of float32 rows, ``scratch`` that of ``experts_scratch_size`` numbers.
    """
    rows, top_k = chosen.shape
    width, inner = experts.width, experts.inner
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
        matrix = experts.down + expert * experts.down_size
        bias = experts.reduce_bias + expert * width * ITEM_SIZE if experts.reduce_bias else 0
        parallel_matmul(thread_pool, threads, experts.reduce, matrix, width, inner, gate, count, products, bias)
        for pair in range(first, end):
            row, product = order[pair] // top_k, products + (pair - first) * width * ITEM_SIZE
            add_in_place(outputs + row * width * ITEM_SIZE, product, width, routing_weights[row, order[pair] % top_k])
        first, active_experts = end, active_experts + 1
    return active_experts


@compiled
def _expand(thread_pool: int, threads: int, experts: Record, expert: int, inputs: int, rows: int, gate: int) -> None:
    """Write ``act(gate) * up`` of one expert, or ``act(up)`` if experts have no gate, to ``gate``.

    ``gate`` must have room for both projections of all rows.
    """
    width, inner = experts.width, experts.inner
    matrix, up_matrix = experts.gate + expert * experts.gate_size, experts.up + expert * experts.up_size
    bias = experts.expand_bias + 2 * expert * inner * ITEM_SIZE if experts.expand_bias else 0
    alpha, limit = experts.alpha, experts.limit
    if experts.has_pairs and not experts.up:
        parallel_matmul(thread_pool, threads, experts.expand, matrix, 2 * inner, width, inputs, rows, gate, bias)
        gate_pairs(gate, rows * inner, alpha, limit, gate)
        return
    up = gate + rows * inner * ITEM_SIZE if experts.up else 0
    parallel_matmul(thread_pool, threads, experts.expand, matrix, inner, width, inputs, rows, gate, 0)
    if up:
        parallel_matmul(thread_pool, threads, experts.expand, up_matrix, inner, width, inputs, rows, up, 0)
    if experts.has_pairs:
        for row in range(rows):
            first = row * inner * ITEM_SIZE
            gate_halves(gate + first, up + first, bias, inner, alpha, limit)
    else:
        activate(experts.activation, gate, up, rows * inner)


def weight_names(experts: Module) -> tuple[str, str]:
    """Return the names of the parameters that a module's first and second matmul read."""
    return UP if UP in experts._parameters else GATE_UP, DOWN


def matrices_of(weight: Any) -> Any:
    """Return a view of a parameter as contiguous ``[experts, rows, columns]``; some modules store the transpose."""
    return weight if weight.is_contiguous() else weight.transpose(1, 2)


class ExpertMatrices(NamedTuple):
    """Location of all experts' matrices in memory, and the matmul that reads them."""

    matmul: int
    """Address of the matmul's kernels."""
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
        matmul = panel.matmul if panel else matmul_of(format_of(part)).address
        memory, size = (panel.data_ptr(), panel.nbytes) if panel else (part.data_ptr(), part.nbytes)
        matrices.append(ExpertMatrices(matmul, memory, size // len(stored)))
    return matrices


def experts_record(module: Any, panels: Mapping[int, Any] = MappingProxyType({})) -> Record:
    """Return the record that describes a layer's experts to compiled code; for ``panels``, see ``expert_matrices``.

    Items are set four times as fast as attributes, and ``CompiledExperts`` needs a record in each call.
    """
    record: Record = np.zeros(1, EXPERTS)[0]
    has_pairs = record["has_pairs"] = _has_pairs(module)
    names, is_gated = weight_names(module), UP not in module._parameters
    (gate, *separate_up), (down,) = (expert_matrices(getattr(module, name), panels) for name in names)
    record["count"], record["width"], record["inner"] = matrices_of(module.down_proj).shape
    record["expand"], record["gate"], record["gate_size"] = gate
    if separate_up or (is_gated and not has_pairs):
        up = separate_up[0] if separate_up else gate._replace(first=gate.first + gate.size // 2)
        record["up"], record["up_size"] = up.first, up.size
    record["reduce"], record["down"], record["down_size"] = down
    if has_pairs:
        record["expand_bias"], record["reduce_bias"] = (getattr(module, name).data_ptr() for name in BIASES)
        record["alpha"], record["limit"] = module.alpha, module.limit
    else:
        record["activation"] = ACTIVATIONS[is_gated][_activation(module)]
    return record


def _has_pairs(module: Any) -> bool:
    return not getattr(module, "is_concatenated", True)


class CompiledExperts(Module):
    """Compiled experts that share another module's parameters and fall back to that module's ``forward``."""

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
    names = weight_names(module)
    is_gated = names[0] == GATE_UP
    expected = PAIRED_EXPERTS if _has_pairs(module) else PLAIN_EXPERTS if is_gated else UNGATED_EXPERTS
    weights: list[Any] = [module._parameters.get(name) for name in names]
    known = {*names, *(BIASES if expected["has_bias"] else ())}
    if set(module._parameters) != known or any(weight is None or weight.dim() != 3 for weight in weights):
        return False
    if not all(getattr(module, name, value) is value for name, value in expected.items()):
        return False
    expand, reduce = (weight.transpose(1, 2) if expected["is_transposed"] else weight for weight in weights)
    number, width, inner = reduce.shape
    return (
        all(_parts_fit(weight, _has_pairs(module)) for weight in weights)
        and (_pairs_fit(module, dtypes) if expected["has_bias"] else _activation(module) in ACTIVATIONS[is_gated])
        and expand.shape == (number, (1 + is_gated) * inner, width)
        and all(weight.shape[2] % COLUMN_MULTIPLE == 0 and is_readable(weight, dtypes) for weight in (expand, reduce))
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


def _activation(module: Any) -> str:
    """Return the class name of the experts' activation; empty for an unknown function."""
    if not module._modules:
        return "SiLU" if getattr(module, "act_fn", None) is silu else ""
    return type(module.act_fn).__name__ if set(module._modules) == {"act_fn"} else ""


def _pairs_fit(module: Any, dtypes: Container[torch.dtype]) -> bool:
    """Return True if experts with interleaved gate and up have the constants and biases that compiled code needs."""
    biases = [module._parameters[name] for name in BIASES]
    shapes = [matrices_of(module._parameters[name]).shape[:2] for name in weight_names(module)]
    return (
        not module._modules
        and all(isinstance(getattr(module, name, None), float) for name in ("alpha", "limit"))
        and all(type(bias) in ORDINARY_TENSORS and is_readable(bias, dtypes) for bias in biases)
        and [bias.shape for bias in biases] == shapes
    )


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
    """Rearrange a model's experts, and replace them by ``CompiledExperts`` that share parameters if outputs match."""
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
            module._modules["experts"] = sharing(CompiledExperts, experts, _usual=type(experts))


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
    """Return a copy with the first ``CHECKED_EXPERTS`` experts, since a check may convert all weights to float32."""
    subset = copy(experts)
    subset._parameters = {name: weight[:CHECKED_EXPERTS] for name, weight in experts._parameters.items()}
    subset.num_experts = min(CHECKED_EXPERTS, experts.num_experts)
    return subset


def _is_same(experts: Any, size: float) -> bool:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, matrices_of(experts.down_proj).shape[1], generator=random) * size
    chosen, routing_weights = torch.tensor([[0], [experts.num_experts - 1], [0]]), torch.tensor([[1.0], [0.5], [2.0]])
    expected = experts(hidden, chosen, routing_weights)
    actual = sharing(CompiledExperts, experts, _usual=type(experts))(hidden, chosen, routing_weights)
    return actual.shape == expected.shape and torch.allclose(actual, expected, TOLERANCE, TOLERANCE * expected.std())
