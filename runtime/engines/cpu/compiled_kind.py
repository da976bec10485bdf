"""The kinds of models that compiled passes compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.nn import Embedding, Module, Parameter

from hdtool.runtime.engines.model_families import FAMILIES, package_of
from hdtool.runtime.engines.model_parts import Kind, LayerParts, ModelParts
from hdtool.runtime.kernels.compact_weight import CompactEmbedding, Stored, is_compact, stored_of
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
        (type(module) in (Embedding, CompactEmbedding) or scale_of(module) is not None)
        and cast(Embedding, module).max_norm is None
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )


def scale_of(embedding: Module) -> float | None:
    """The factor of an embedding of the library that scales its rows."""
    if not (type(embedding).__name__.endswith("ScaledWordEmbedding") and package_of(embedding)):
        return None
    scale = embedding._buffers.get("embed_scale")
    return None if scale is None or scale.numel() != 1 else float(scale)


COMPILED: Kind[CompiledLinear] = Kind(_multiplies, _fits, _embeds, LANES, FAMILIES)
ACTIVATIONS = ("silu", "gelu_tanh")
"""Those of gated units that are compiled."""


class MatmulRows(NamedTuple):
    """The rows of a linear layer that are one matmul of a decoder layer: all, or a part where several are joined."""

    layer: CompiledLinear
    first: int
    end: int

    @property
    def stored(self) -> Stored:
        """The rows as they are kept."""
        stored = stored_of(self.layer.weight)
        return stored if len(stored) == self.end - self.first else stored[self.first : self.end]


def matmuls_of(part: LayerParts[CompiledLinear]) -> list[MatmulRows]:
    """The matmuls of a decoder layer in the order of its record."""
    keys, inner = part.heads * part.width, part.inner
    return [
        *_split(part.qkv, (keys * part.groups, keys, keys)),
        MatmulRows(part.out, 0, part.hidden),
        *_split(part.gate_up, (inner, inner)),
        *_split(part.down, (part.hidden,)),
    ]


def _split(layers: Sequence[CompiledLinear], sizes: Sequence[int]) -> list[MatmulRows]:
    if len(layers) == len(sizes):
        return [MatmulRows(layer, 0, size) for layer, size in zip(layers, sizes, strict=True)]
    (joined,) = layers
    return [MatmulRows(joined, end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
