"""Recognizes the attention of a decoder layer: with keys and values of heads, or with latent vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.nn import Module

from hdtool.runtime.program.latent_parts import latent_parts
from hdtool.runtime.program.mixer_parts import epsilon_of

if TYPE_CHECKING:
    from hdtool.runtime.program.llama_like_families import Family
    from hdtool.runtime.program.model_parts import EngineSupport, LayerParts

Matmul = TypeVar("Matmul", bound=Module)
SHARED = -1
"""``layer_idx`` of an attention module that several layers may share."""


def with_attention(
    parts: LayerParts[Matmul], attention: Module, index: int, support: EngineSupport[Matmul], family: Family
) -> LayerParts[Matmul] | None:
    """Return a layer's parts with those of its attention; None if the engine can't compute the attention."""
    head_norms = tuple(attention.get_submodule(name) for name in family.names.head_norms if name in attention._modules)
    described, out_name = family.attention, family.names.out
    projections = ("qkv_proj",) if described.joins_qkv else described.projections(attention)
    reads_other = not described.joins_qkv and len(projections) == 1
    value_norm = attention._modules.get(described.value_norm) if described.value_norm else None
    norm_names = {*family.names.head_norms[: len(head_norms)], *([described.value_norm] if value_norm else ())}
    modules = attention._modules.keys() - (family.side.lists if family.side else ())
    if modules != {*projections, out_name, *norm_names}:
        return None
    if len(head_norms) not in (0, 1 if reads_other else 2):
        return None
    if (value_norm is None) != (reads_other or not described.value_norm):
        return None
    qkv: tuple[Any, ...] = tuple(getattr(attention, name) for name in projections)
    out: Any = attention.get_submodule(out_name)
    epsilons = {epsilon_of(norm, family.norm.parameters) for norm in head_norms}
    epsilons |= {epsilon_of(value_norm, ())} if value_norm else set()
    width, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
    if not all(map(support.is_linear, (*qkv, out))) or not epsilons <= {parts.epsilon}:
        return None
    if (
        getattr(attention, "layer_idx", None) != (SHARED if family.side else index)
        or not isinstance(scale, float)
        or not isinstance(width, int)
        or not width
        or width % support.divisor
    ):
        return None
    # In a joined matrix, queries have as many rows as the output projection has inputs; keys and values share the rest.
    if reads_other:
        keys = out.in_features // int(cast(Any, attention).num_key_value_groups)
    else:
        keys = (qkv[0].out_features - out.in_features) / 2 if described.joins_qkv else qkv[1].out_features
    heads, rest = divmod(keys, width)
    if rest or not heads or out.in_features % (heads * width):
        return None
    groups = out.in_features // (int(heads) * width)
    return replace(
        parts, attention=attention, qkv=qkv, out=out, head_norms=head_norms, heads=int(heads), groups=groups,
        width=width, scale=scale, value_norm=value_norm,
    )  # fmt: skip


def with_latents(
    parts: LayerParts[Matmul], attention: Any, index: int, support: EngineSupport[Matmul], family: Family
) -> LayerParts[Matmul] | None:
    """Return a layer's parts with those of its latent attention; None if the engine can't compute the attention."""
    out = attention.get_submodule(family.names.out)
    latent, scale = latent_parts(attention, out, support, family), attention.scaling
    if latent is None or attention.layer_idx != index or not isinstance(scale, float):
        return None
    return replace(
        parts, attention=attention, qkv=latent.inputs, out=out, heads=1, groups=latent.heads, width=latent.rank,
        scale=scale, latent=latent,
    )  # fmt: skip
