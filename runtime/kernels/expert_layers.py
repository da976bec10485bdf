"""Layers of experts that compiled code computes, and the records that describe their weights to it."""

from __future__ import annotations

from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import Module
from torch.nn.functional import silu

from hdtool.runtime.kernels.compact_weight import is_compact, stored_of
from hdtool.runtime.kernels.compiled import Record
from hdtool.runtime.kernels.linear_layers import ORDINARY_TENSORS, format_of, is_readable
from hdtool.runtime.kernels.matmul_choice import COLUMN_MULTIPLE, matmul_of
from hdtool.runtime.kernels.packed_matrix import PackedExperts
from hdtool.runtime.kernels.row_operations import (
    SILU,
    SQUARED_RELU,
    TANH_GELU,
)
from hdtool.runtime.kernels.thread_pool import shared_thread_pool

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

from hdtool.runtime.kernels.mixture_of_experts import EXPERTS, experts_scratch_size, mix_experts

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
        matmul = panel.matmul if panel else matmul_of(*format_of(part)).address
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
    """Rearrange a model's experts; replace them with ``CompiledExperts`` if outputs match. Parameters are shared."""
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
    """Return a copy of the module with its first ``CHECKED_EXPERTS`` experts: transformers' code may expand all."""
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
