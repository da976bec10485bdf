"""Merges the weights of linear layers that read the same input, so that one matmul computes them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import accumulate
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from hdtool.runtime.engines.reference.program_pass import Join, Matmul, join_outputs
from hdtool.runtime.model.weight_changes import hooks_of

MERGED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Merged weights, keyed by address, so that several targets of one model can share them."""


def _memory_of(weight: torch.Tensor) -> int:
    """Return the address of a weight's storage, or the tensor's ``id`` if it has no storage."""
    return weight.untyped_storage().data_ptr() or id(weight)


def merging(model: Module) -> Join:
    """Return a ``Join`` that computes linear layers of a model in one matmul where possible, by merging their weights.

    The weights become views of one merged tensor.
    """
    weights = [weight for module in model.modules() for weight in module.parameters(recurse=False)]
    return partial(_join_weights, Counter(_memory_of(weight) for weight in weights if type(weight) is Parameter))


def _join_weights(uses: Counter[int], modules: list[Any]) -> Matmul:
    if len(modules) == 1:
        return cast(Matmul, modules[0])
    if all(_is_mergeable(module, uses) for module in modules) and len({module.bias is None for module in modules}) == 1:
        weight = _merged([module.weight for module in modules])
        bias = None if modules[0].bias is None else _merged([module.bias for module in modules])
        return partial(linear, weight=weight, bias=bias)
    return join_outputs(modules)


def _is_mergeable(module: Any, uses: Counter[int]) -> bool:
    """Return True if a module is an unmodified ``Linear`` whose weights don't share memory with other tensors.

    Other owners of shared memory, such as an optimizer with all weights in one buffer, would go on using that memory.
    """
    is_plain = type(module) is Linear and "forward" not in vars(module) and not any(map(len, hooks_of([module])))
    return is_plain and all(
        type(weight) is Parameter
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and uses[_memory_of(weight)] == 1
        and weight.untyped_storage().nbytes() == weight.nbytes
        for weight in module.parameters()
    )


def _merged(parameters: list[Any]) -> torch.Tensor:
    """Concatenate parameters into one tensor and make each parameter a view of it, so that no weight is stored twice.

    Each view gets a separate storage object, because code that saves a model may reject or drop tensors that share one.
    """
    if (merged := _merged_before(parameters)) is None:
        # Inference tensors can't be trained, and parameters made in inference mode accept no others as data.
        with torch.inference_mode(parameters[0].is_inference()):
            merged = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, merged.split(list(map(len, parameters))), strict=True):
                parameter.data = torch.from_dlpack(part)  # type: ignore[attr-defined]
        MERGED[merged.data_ptr()] = merged
    return merged


def _merged_before(parameters: list[Any]) -> torch.Tensor | None:
    """Return the merged tensor that consists of exactly these parameters in this order, or None if there is none."""
    merged = MERGED.get(parameters[0].data_ptr())
    if merged is None or merged.dtype != parameters[0].dtype:
        return None
    ends = list(accumulate((parameter.nbytes for parameter in parameters), initial=merged.data_ptr()))
    are_parts = [parameter.data_ptr() for parameter in parameters] == ends[:-1]
    return merged if are_parts and ends[-1] == merged.data_ptr() + merged.nbytes else None
