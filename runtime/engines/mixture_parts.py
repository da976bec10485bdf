"""Recognises mixtures of experts that a layer has beside its MLP, both of which read the output of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn import Module

from hdtool.runtime.engines.model_families import is_of_package, package_of

if TYPE_CHECKING:
    from hdtool.runtime.engines.model_parts import Kind

Matmul = TypeVar("Matmul", bound=Module)
NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
ROUTER, EXPERTS = "router", "experts"
OF_MIXTURE = frozenset({ROUTER, EXPERTS, *NORMS})
"""Modules of a layer with such a mixture."""
OF_ROUTER = frozenset({"config", "eps", "hidden_size", "scalar_root_size", "training"})
"""Attributes of routers that this package reads, or that change nothing."""


@dataclass(frozen=True)
class MixtureParts(Generic[Matmul]):
    """The modules of a mixture beside an MLP."""

    router: Module
    experts: Module
    norms: tuple[Module, ...]
    """Those after the MLP, before the experts, and after their sum."""

    @property
    def projection(self) -> Matmul:
        """What gives the scores of experts."""
        return self.router.get_submodule("proj")  # type: ignore[return-value]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the router multiplies normed rows by, and the shares of each expert."""
        router: Any = self.router
        return router.scale, router.per_expert_scale

    @property
    def factor(self) -> float:
        """What the router multiplies normed rows by, besides."""
        return float(self.router.scalar_root_size)  # type: ignore[arg-type]

    @property
    def top(self) -> int:
        """The experts of a row."""
        router: Any = self.router
        return int(router.config.top_k_experts)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Those of the router and the experts."""
        for module in (self.router, self.experts):
            yield from module.parameters()
            yield from module.buffers()


def mixture_parts(layer: Module, router: str) -> MixtureParts[Any] | None:
    """The mixture beside the MLP of a layer, with a router of this class; None if there is none."""
    own = layer._modules
    if not router or own.get(EXPERTS) is None or type(own.get(ROUTER)).__name__ != router:
        return None
    norms = tuple(own.get(name) for name in NORMS)
    if None in norms:
        return None
    return MixtureParts(layer.get_submodule(ROUTER), layer.get_submodule(EXPERTS), norms)  # type: ignore[arg-type]


def is_known_mixture(parts: MixtureParts[Any], layer: Module, width: int, epsilon: float, kind: Kind[Any]) -> bool:
    """Whether the router of a mixture computes what its class says, as far as its modules and attributes tell."""
    router, package = parts.router, package_of(layer)
    norm: Any = router._modules.get("norm")
    projection: Any = router._modules.get("proj")
    if set(router._modules) != {"norm", "proj"} or set(router._parameters) != {"scale", "per_expert_scale"}:
        return False
    number = getattr(projection, "out_features", 0)
    return (
        is_of_package(router, package)
        and is_of_package(norm, package)
        and all(name in OF_ROUTER or name.startswith("_") for name in vars(router))
        and isinstance(getattr(router, "scalar_root_size", None), float)
        and not norm._parameters
        and getattr(norm, "eps", None) == epsilon
        and kind.multiplies(projection)
        and projection.in_features == width
        and projection.bias is None
        and [len(weight) for weight in parts.weights] == [width, number]
        and all(map(kind.fits, parts.weights))
        and not any("forward" in vars(module) for module in router.modules())
    )
