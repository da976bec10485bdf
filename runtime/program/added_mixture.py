"""Recognizes mixtures of experts that are added to a layer's MLP and have norms of their own, as in Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn import Module

from hdtool.runtime.program.llama_like_families import is_of_package, package_of
from hdtool.runtime.program.mixer_parts import tensors_of

if TYPE_CHECKING:
    from hdtool.runtime.program.model_parts import EngineSupport

Matmul = TypeVar("Matmul", bound=Module)
NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
ROUTER, EXPERTS = "router", "experts"
MIXTURE_MODULES = frozenset({ROUTER, EXPERTS, *NORMS})
"""Names of the modules that a layer with both experts and an MLP has in addition to other layers' modules."""
ROUTER_MODULE_ATTRIBUTES = frozenset({"config", "eps", "hidden_size", "scalar_root_size", "training"})
"""Router attributes that this package reads or that don't affect the result."""


@dataclass(frozen=True)
class MixtureParts(Generic[Matmul]):
    """The modules of a mixture of experts whose output is added to an MLP's output."""

    router: Module
    experts: Module
    norms: tuple[Module, ...]
    """Norms of the MLP's output, of the experts' input, and of the experts' summed output."""

    @property
    def projection(self) -> Matmul:
        """Linear layer that computes expert scores."""
        return self.router.get_submodule("proj")  # type: ignore[return-value]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(scale, factors)``: one scale per channel of the router's input, and one factor per expert's output."""
        router: Any = self.router
        return router.scale, router.per_expert_scale

    @property
    def factor(self) -> float:
        """Constant that scales the router's input."""
        return float(self.router.scalar_root_size)  # type: ignore[arg-type]

    @property
    def top(self) -> int:
        """Number of experts per token."""
        router: Any = self.router
        return int(router.config.top_k_experts)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        for module in (self.router, self.experts):
            yield from tensors_of(module)


def mixture_parts(layer: Module, router: str) -> MixtureParts[Any] | None:
    """Return the mixture added to a layer's MLP; None if a router of class ``router`` or a norm is missing."""
    modules = layer._modules
    if not router or modules.get(EXPERTS) is None or type(modules.get(ROUTER)).__name__ != router:
        return None
    norms = tuple(modules.get(name) for name in NORMS)
    if None in norms:
        return None
    return MixtureParts(layer.get_submodule(ROUTER), layer.get_submodule(EXPERTS), norms)  # type: ignore[arg-type]


def is_known_mixture(
    parts: MixtureParts[Any], layer: Module, width: int, epsilon: float, support: EngineSupport[Any]
) -> bool:
    """Return True if the engine supports a mixture's router, whose modules, parameters and attributes must be known."""
    router, package = parts.router, package_of(layer)
    norm: Any = router._modules.get("norm")
    projection: Any = router._modules.get("proj")
    if set(router._modules) != {"norm", "proj"} or set(router._parameters) != {"scale", "per_expert_scale"}:
        return False
    experts = getattr(projection, "out_features", 0)
    return (
        is_of_package(router, package)
        and is_of_package(norm, package)
        and all(name in ROUTER_MODULE_ATTRIBUTES or name.startswith("_") for name in vars(router))
        and isinstance(getattr(router, "scalar_root_size", None), float)
        and not norm._parameters
        and getattr(norm, "eps", None) == epsilon
        and support.is_linear(projection)
        and projection.in_features == width
        and projection.bias is None
        and [len(weight) for weight in parts.weights] == [width, experts]
        and all(map(support.is_readable, parts.weights))
        and not any("forward" in vars(module) for module in router.modules())
    )
