"""Recognises mixtures of experts in the library's own modules, and what chooses the experts of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter

BLOCK_ATTRIBUTES = frozenset({
    "config", "hidden_dim", "input_size", "jitter_noise", "num_experts", "top_k", "training", "use_expert_bias",
})  # fmt: skip
ROUTER_ATTRIBUTES = frozenset({
    "hidden_dim", "norm_min", "norm_topk_prob", "num_experts", "num_group", "routed_scaling_factor", "top_k",
    "topk_group", "training", "use_expert_bias",
})  # fmt: skip
"""Attributes that this file reads, that the shapes of weights show, or that training alone reads."""


@dataclass(frozen=True)
class ExpertKind:
    """What a type of models has in place of an MLP in some layers, or beside it."""

    block: str
    """The class of the mixture, which engines without code for experts call as it is."""
    router: str
    """The class of what chooses experts."""
    gate: str = "gate"
    """The name of that in the mixture."""
    beside: str = ""
    """The name of a mixture in the layer that is added to the MLP; empty for one in the place of it."""
    shared: str = ""
    """The name in the mixture of an MLP that all tokens have."""
    shared_gate: str = ""
    """The name of a linear layer whose sigmoid is the share of that."""
    has_sigmoids: bool = False
    """Whether shares are sigmoids of scores, and no softmax."""
    correction: str = ""
    """The name in the mixture of what is added to shares to choose by, where there is such a tensor."""
    added: float = 0.0
    """Added to the sum by which shares are divided."""


@dataclass(frozen=True)
class Router:
    """What chooses the experts of a token."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    top: int
    """Experts of a token."""
    has_sigmoids: bool
    renorms: bool
    """Whether shares are made to add up to 1."""
    correction: torch.Tensor | None
    groups: int
    used_groups: int
    factor: float
    """By which all shares are multiplied in the end."""
    added: float
    """Added to the sum by which shares are divided."""
    least: float
    """The least sum by which shares are divided."""


def qwen_experts(family: str) -> ExpertKind:
    """The mixture of a family of Qwen, with a gated MLP that all tokens have; ``family`` begins its classes' names."""
    return ExpertKind(
        f"{family}SparseMoeBlock",
        f"{family}TopKRouter",
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


def router_of(block: Any, kind: ExpertKind) -> Router | None:
    """What chooses the experts of a mixture of a known kind; None where it has anything more than is known."""
    gate = block._modules.get(kind.gate)
    if gate is None or type(gate).__name__ != kind.router:
        return None
    own = (block, *(module for name, module in block.named_modules() if name.split(".")[0] == kind.gate))
    known = {kind.gate, "experts", *filter(None, [kind.shared, kind.shared_gate])}
    present = {name for name, module in block._modules.items() if module is not None}
    if not {kind.gate, "experts"} <= present <= known or any("forward" in vars(module) for module in own):
        return None
    if not _knows(block, BLOCK_ATTRIBUTES | {kind.shared}) or not _knows(gate, ROUTER_ATTRIBUTES):
        return None
    weight, bias, correction = gate._parameters.get("weight"), gate._parameters.get("bias"), _tensor(block, kind)
    tensors = [one for one in (weight, bias, correction) if one is not None]
    held = [*block._parameters.values(), *block._buffers.values(), *gate.parameters(), *gate.buffers()]
    number = len(block.experts.down_proj)
    groups, used = getattr(gate, "num_group", 1), getattr(gate, "topk_group", 1)
    if (
        weight is None
        or {id(one) for one in held} != {id(one) for one in tensors}
        or weight.dim() != 2
        or any(one.numel() != number for one in tensors if one is not weight)
        or len(weight) != number
        or (groups > 1 and (correction is None or number % groups or number // groups < 2))
    ):
        return None
    return Router(
        weight,
        bias,
        int(gate.top_k),
        kind.has_sigmoids,
        bool(getattr(gate, "norm_topk_prob", True)),
        correction,
        int(groups),
        int(used),
        float(getattr(gate, "routed_scaling_factor", 1.0)),
        kind.added,
        float(getattr(gate, "norm_min", 0.0)),
    )


def _tensor(block: Module, kind: ExpertKind) -> torch.Tensor | None:
    path, _, name = kind.correction.rpartition(".")
    try:
        found: Any = getattr(block.get_submodule(path), name, None) if name else None
    except AttributeError:
        return None
    return found if isinstance(found, (torch.Tensor, Parameter)) else None


def _knows(module: Module, attributes: frozenset[str]) -> bool:
    return all(name in attributes or name.startswith("_") for name in vars(module))
