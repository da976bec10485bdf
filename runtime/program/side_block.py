"""Recognizes blocks of attention and an MLP whose output is only read by the layer's mixer, as in Zamba 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch.nn import Module, Sequential

from hdtool.runtime.program.mixer_parts import epsilon_of, tensors_of

if TYPE_CHECKING:
    from hdtool.runtime.program.llama_like_families import Family
    from hdtool.runtime.program.model_parts import EngineSupport, LayerParts

Matmul = TypeVar("Matmul", bound=Module)
PROJECTIONS, GATE_UP = ("queries", "keys", "values"), "gate_up"
"""Names of the matmuls that may have adapters: those of the attention, and the first of the MLP."""


@dataclass(frozen=True)
class SideNames:
    """Names of the modules of layers with a side block."""

    holders: tuple[str, ...]
    """Names of modules that only group others; ``modules_of`` prefixes the others' names with the group's and a dot."""
    norm: str
    out: str
    adapters: Mapping[str, str]
    """Paths of lists of adapters, by the matmul whose output they change: one of ``PROJECTIONS``, or ``GATE_UP``."""

    @property
    def lists(self) -> frozenset[str]:
        """Names of the lists of adapters in the attention and the MLP."""
        return frozenset(path.rpartition(".")[2] for path in self.adapters.values())


@dataclass(frozen=True)
class SideBlock(Generic[Matmul]):
    """The modules, besides attention and MLP, of a block whose output only the layer's mixer reads.

    Without residual connections, the MLP reads the normalized output of the attention, and ``out`` reads the output of
    the MLP. Layers may share the modules of their blocks.
    """

    norm: Module
    """Norm of the hidden states joined with the token embeddings, which the attention reads."""
    out: Matmul
    """Linear layer whose output is added to what the norm before the mixer reads, not to the layer's hidden states."""
    adapters: Mapping[str, tuple[Matmul, Matmul]]
    """Two linear layers, one after the other, by the matmul to whose output they add; see ``SideNames.adapters``."""
    lists: tuple[Module, ...]
    """Adapters of all layers that share the block."""

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        return self.out, *(matmul for adapter in self.adapters.values() for matmul in adapter)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights of the adapters, including those of other layers."""
        for adapters in self.lists:
            yield from tensors_of(adapters)


def modules_of(layer: Module, family: Family) -> dict[str, Module | None]:
    """Return a layer's modules by name, with a holder's modules in place of the holder."""
    modules = dict[str, Module | None]()
    for name, child in layer._modules.items():
        if child is not None and family.side and name in family.side.holders:
            modules |= {f"{name}.{inner}": module for inner, module in child._modules.items()}
        else:
            modules[name] = child
    return modules


def with_side_block(
    parts: LayerParts[Matmul], index: int, support: EngineSupport[Matmul], names: SideNames
) -> LayerParts[Matmul] | None:
    """Return a layer's parts with those of its side block; None for unsupported modules."""
    layer, adapters, lists = parts.layer, dict[str, Any](), list[Module]()
    adapted = dict(zip((*PROJECTIONS, GATE_UP), (*parts.qkv, *parts.gate_up), strict=True))
    for matmul, path in names.adapters.items():
        holder, _, name = path.rpartition(".")
        block: Any = layer.get_submodule(holder)
        if (adapters_of_layers := block._modules.get(name)) is not None:
            lists.append(adapters_of_layers)
            adapters[matmul] = adapters_of_layers._modules.get(str(getattr(block, "layer_dic", {}).get(index)))
    has_all = len(adapters.keys() & {*PROJECTIONS}) in (0, len(PROJECTIONS))
    norm, out = (cast(Any, layer.get_submodule(name)) for name in (names.norm, names.out))
    if not has_all or not all(_fits(adapter, adapted[matmul], support) for matmul, adapter in adapters.items()):
        return None
    if epsilon_of(norm) != parts.epsilon or not support.is_linear(out) or out.in_features != parts.hidden:
        return None
    chains = {matmul: tuple(adapter) for matmul, adapter in adapters.items()}
    return replace(parts, side=SideBlock(norm, out, chains, tuple(lists)))


def _fits(adapter: Any, matmul: Any, support: EngineSupport[Any]) -> bool:
    """Return True if an adapter is two linear layers, from the input width to the output width of ``matmul``."""
    if type(adapter) is not Sequential or len(adapter) != 2 or not all(map(support.is_linear, adapter)):
        return False
    first, second = cast(Any, adapter)
    return (first.in_features, second.out_features) == (matmul.in_features, matmul.out_features) and (
        first.out_features == second.in_features
    )
