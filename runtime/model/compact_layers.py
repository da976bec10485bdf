"""Keeps a CPU model's weights in the checkpoint's 16-bit dtype or in packed blocks, without changing any result.

A weight is kept in 16 bits only if 16 bits represent its values exactly. Any compact weight must be used only by linear
layers, experts and embeddings, and the compiled matmul must give bitwise equal results for the compact and the expanded
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module, Parameter
from transformers import PreTrainedModel

from hdtool.runtime.kernels.compact_weight import (
    NARROW_DTYPES,
    CompactEmbedding,
    CompactWeight,
    Stored,
    as_parameter,
    expand_compact,
    is_compact,
    narrowed,
    sharing,
)
from hdtool.runtime.kernels.compiled import return_free_memory
from hdtool.runtime.kernels.gemm_tiles import MAX_TILE_ROWS, TILE_OUT_FEATURES
from hdtool.runtime.kernels.linear_layers import FORMATS_OF_DTYPES, compiled_linear, fits_compiled_matmul
from hdtool.runtime.kernels.matmul import MAX_REGISTER_ROWS
from hdtool.runtime.kernels.mixture_of_experts import WEIGHTS, arrange_experts, fits_compiled_experts, matrices_of
from hdtool.runtime.kernels.packed_matrix import PackedExperts, PackedMatrix, packed_weight
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16

ParameterRef = tuple[Module, str]
"""A module and the name of one of its parameters."""
TRIED_ROWS = (*range(1, MAX_TILE_ROWS + 1), MAX_REGISTER_ROWS + 1)
"""Numbers of input rows that together use every way in which the compiled matmul expands weights."""


def compact_weights(model: Module, proved: dict[str, bool] | None = None) -> None:
    """Keep the weights of linear layers, experts and embeddings in 16 bits if possible; expand all others to float32.

    Packed weights stay packed under the same conditions. Buffers are expanded, and saving the model expands weights.
    ``proved`` says for each kind of weight tested so far whether the compiled matmul gives bitwise equal results for
    compact and expanded weights; new kinds are added.
    """
    proved = {} if proved is None else proved
    arrange_experts(model)
    for refs in list(_parameters_by_weight(model).values()):
        module, name = refs[0]
        weight: Any = module._parameters[name]
        fits = is_of_linear_layers(refs)
        if is_compact(weight):
            if not fits or not _is_proved(weight.stored, refs, proved):
                replace_parameter(refs, expand_compact(weight), requires_grad=weight.requires_grad)
            continue
        narrow = narrowed(weight.detach()) if fits else None
        if narrow is not None and _is_proved(narrow, refs, proved):
            replace_parameter(refs, CompactWeight(narrow), requires_grad=weight.requires_grad)
        elif weight.dtype in NARROW_DTYPES and _is_ordinary(weight):
            replace_parameter(refs, weight.detach().float(), requires_grad=weight.requires_grad)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in NARROW_DTYPES:
                module._buffers[name] = buffer.float()
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is Embedding and is_compact(child.weight):
                module._modules[name] = sharing(CompactEmbedding, child)
    model.register_state_dict_post_hook(_expand_state)
    return_free_memory()


def pack_weights(model: PreTrainedModel) -> bool:
    """Pack those torchao weights of a float32 model that only linear layers use; return True if any were packed."""
    packed_any = False
    for refs in list(_parameters_by_weight(model).values()) if model.dtype == torch.float32 else []:
        module, name = refs[0]
        packed = packed_weight(module._parameters[name])
        if packed is not None and all(type(module) is Linear for module, _ in refs):
            replace_parameter(refs, CompactWeight(packed))
            packed_any = True
    return packed_any


def expand_weights_read(model: Module) -> None:
    """Permanently expand to float32 the compact weights that earlier passes had to expand.

    Code other than compiled matmuls gets correct results from compact weights, but expands them in each pass.
    """
    for weight, refs in compact_parameters(model):
        if weight.expansions.count:
            replace_parameter(refs, expand_compact(weight), requires_grad=weight.requires_grad)


def has_compact_weights(model: Module) -> bool:
    return any(map(is_compact, model.parameters()))


def compact_parameters(model: Module) -> list[tuple[CompactWeight, list[ParameterRef]]]:
    """Return ``(weight, refs)`` for each compact weight; ``refs`` are the pairs ``(module, name)`` that refer to it."""
    return [(weight, refs) for refs, weight in weight_parameters(model) if is_compact(weight)]


def is_of_linear_layers(refs: list[ParameterRef]) -> bool:
    """Return True if a weight is used only by linear layers, experts and embeddings that support compact weights."""
    return all(_takes(*ref) for ref in refs)


def weight_parameters(model: Module) -> list[tuple[list[ParameterRef], torch.Tensor]]:
    """Return ``(refs, weight)`` for each weight; ``refs`` are the pairs ``(module, name)`` that refer to it."""
    entries = [(refs, refs[0][0]._parameters[refs[0][1]]) for refs in _parameters_by_weight(model).values()]
    return [(refs, weight) for refs, weight in entries if weight is not None]


def replace_parameter(refs: list[ParameterRef], weight: torch.Tensor, *, requires_grad: bool = False) -> None:
    if is_compact(weight) and not requires_grad:
        parameter: Any = as_parameter(weight)
    else:
        parameter = weight if isinstance(weight, Parameter) else Parameter(weight, requires_grad=requires_grad)
    for module, name in refs:
        module._parameters[name] = parameter


def _parameters_by_weight(model: Module) -> dict[int, list[ParameterRef]]:
    """Return all references to each parameter, keyed by the parameter's id; a tied parameter has several."""
    refs: dict[int, list[ParameterRef]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                refs.setdefault(id(parameter), []).append((module, name))
    return refs


def _takes(module: Module, name: str) -> bool:
    """Return True if a module can compute with a compact weight without expanding all of it."""
    if name in WEIGHTS:
        return fits_compiled_experts(module, FORMATS_OF_DTYPES)
    if name == "weight" and isinstance(module, Embedding):
        weight = module.weight
        is_plain = weight.is_cpu and _is_ordinary(weight) and weight.dim() == 2 and weight.is_contiguous()
        return is_plain and module.max_norm is None  # with a limit, lookups modify the weight
    return name == "weight" and type(module) is Linear and fits_compiled_matmul(module, FORMATS_OF_DTYPES)


def _is_ordinary(weight: torch.Tensor) -> bool:
    """Return True if a weight is compact or a plain tensor, not an instance of a quantization library's class."""
    return is_compact(weight) or type(weight.data) is torch.Tensor


def _is_proved(stored: Stored, refs: list[ParameterRef], proved: dict[str, bool]) -> bool:
    """Return True if the compiled matmul gives bitwise equal results for compact and expanded weights of this kind.

    Each kind is tested only once. A weight that only embeddings use needs no test.
    """
    if all(isinstance(module, Embedding) for module, _ in refs):
        return True
    if isinstance(stored, PackedExperts):
        stored = stored.parts[0][: len(stored.parts[0]) // len(stored)]
    elif len(stored.shape) == 3:
        stored = matrices_of(stored)[0]  # all experts have the same shape
    case = f"{stored.shape[1]} columns of {stored.format.name if isinstance(stored, PackedMatrix) else stored.dtype}"
    if case not in proved:
        proved[case] = _has_same_bits(stored)
    return proved[case]


@torch.inference_mode()
def _has_same_bits(narrow: Stored) -> bool:
    """Return True if the compiled matmul gives bitwise equal results for compact and expanded weights."""
    if narrow.dtype == torch.float16 and not EXPANDS_FLOAT16:
        return False
    part = narrow[: TILE_OUT_FEATURES + 1]
    inputs = torch.randn(
        max(TRIED_ROWS), part.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    return all(
        torch.equal(compiled_linear(inputs[:rows], part), compiled_linear(inputs[:rows], part.float()))
        for rows in TRIED_ROWS
    )


_EXPANDS = ContextVar("_EXPANDS", default=True)


@contextmanager
def compact_states() -> Iterator[None]:
    """In this block, state dicts hold compact weights as they are, for callers that read names and shapes only."""
    before = _EXPANDS.set(False)
    try:
        yield
    finally:
        _EXPANDS.reset(before)


def _expand_state(module: Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Expand compact weights in a state dict to float32, as needed for saving; tied weights keep sharing memory."""
    if not _EXPANDS.get():
        return
    expanded: dict[int, torch.Tensor] = {}
    for name, weight in state.items():
        if is_compact(weight):
            address = weight.stored.data_ptr()
            if address not in expanded:
                expanded[address] = expand_compact(weight)
            state[name] = expanded[address]
