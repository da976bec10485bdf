"""The kind of model that compiled passes compute."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch.nn import Embedding, Module, Parameter

from hdtool.runtime.engines.model_parts import Kind, ModelParts
from hdtool.runtime.kernels.compact_weight import CompactEmbedding, is_compact
from hdtool.runtime.kernels.linear import CompiledLinear
from hdtool.runtime.kernels.vector_code import LANES

CompiledParts: TypeAlias = ModelParts[CompiledLinear]


def _multiplies(module: Any) -> bool:
    is_own = type(module) is CompiledLinear and "forward" not in vars(module)
    is_whole = is_own and module.weight.shape == (module.out_features, module.in_features)
    return is_whole and all(map(_fits, module.parameters()))


def _fits(weight: Any) -> bool:
    is_float = weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()
    return is_float and (is_compact(weight) or type(weight) is Parameter)


def _embeds(module: Module) -> bool:
    weight: Any = module._parameters.get("weight")
    return (
        type(module) in (Embedding, CompactEmbedding)
        and cast(Embedding, module).max_norm is None
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )


COMPILED: Kind[CompiledLinear] = Kind(_multiplies, _fits, _embeds, LANES)
