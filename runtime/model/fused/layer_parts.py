"""Recognises decoder layers of the Llama kind by their structure: Llama, Mistral, Qwen2, Qwen3 and others like them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.small_batch_linear import SmallBatchLinear
from hdtool.runtime.kernels.vector_code import LANES

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS_OF_HEADS = {"q_norm", "k_norm"}
OF_UNIT = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS = ("SiLU", "SiLUActivation")


@dataclass(frozen=True)
class LayerParts:
    """The modules of one layer, and its shapes."""

    layer: Module
    products: tuple[SmallBatchLinear, ...]
    """Of queries, keys, values and the output of attention; of the gate, the upper and the lower part of the unit."""
    norms: tuple[Module, ...]
    """Before attention, after it, and those of queries and keys if there are any."""
    heads: int
    """Of keys and values."""
    groups: int
    """Heads of queries for each head of keys."""
    width: int
    epsilon: float
    scale: float

    @property
    def hidden(self) -> int:
        return self.products[0].in_features

    @property
    def inner(self) -> int:
        return self.products[4].out_features

    @property
    def shape(self) -> tuple[object, ...]:
        """What all layers of a stack have in common."""
        kinds = type(self.layer), len(self.norms), self.hidden, self.inner
        return *kinds, self.heads, self.groups, self.width, self.epsilon, self.scale

    @property
    def modules(self) -> list[Module]:
        return list(self.layer.modules())


def parts_of(layer: Module, place: int) -> LayerParts | None:
    """The parts of the layer at a place of a stack; None if it is of another kind."""
    if set(layer._modules) != PARTS:
        return None
    attention, unit = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    norms_of_heads = set(attention._modules) & NORMS_OF_HEADS
    activation = type(getattr(unit, "act_fn", None)).__name__
    known = set(attention._modules) == OF_ATTENTION | norms_of_heads and len(norms_of_heads) in (0, 2)
    if not known or set(unit._modules) != OF_UNIT or activation not in ACTIVATIONS:
        return None
    products = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    products += [getattr(unit, f"{name}_proj") for name in ("gate", "up", "down")]
    norms = [layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if norms_of_heads]
    epsilons = {epsilon_of(norm) for norm in norms}
    width, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
    if not all(type(one) is SmallBatchLinear for one in products) or len(epsilons) > 1 or not isinstance(scale, float):
        return None
    if getattr(attention, "layer_idx", None) != place or not isinstance(width, int) or not width or width % LANES:
        return None
    heads, left = divmod(products[1].out_features, width)
    epsilon = epsilons.pop()
    if epsilon is None or left or not heads or products[0].out_features % (heads * width):
        return None
    groups = products[0].out_features // (heads * width)
    parts = LayerParts(layer, tuple(products), tuple(norms), heads, groups, width, epsilon, scale)
    return parts if _is_complete(parts) else None


def _is_complete(parts: LayerParts) -> bool:
    """Whether all shapes fit and the layer has no other parameters."""
    hidden, inner, keys = parts.hidden, parts.inner, parts.heads * parts.width
    queries = keys * parts.groups
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    widths = [hidden, hidden, parts.width, parts.width][: len(parts.norms)]
    own = [parameter for module in (*parts.products, *parts.norms) for parameter in module.parameters()]
    return (
        all(product.weight.shape == shape for product, shape in zip(parts.products, shapes, strict=True))
        and all(norm._parameters["weight"].shape == (width,) for norm, width in zip(parts.norms, widths, strict=True))  # type: ignore[union-attr]
        and all(weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() for weight in own)
        and all(is_compact(weight) or type(weight) is torch.nn.Parameter for weight in own)
        and {id(weight) for weight in own} == {id(weight) for weight in parts.layer.parameters()}
        and not any(True for _ in parts.layer.buffers())
        and not any("forward" in vars(module) for module in parts.modules)
    )


def epsilon_of(norm: Module) -> float | None:
    """The epsilon of an RMSNorm; None if the module has other parameters."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return epsilon if set(norm._parameters) == {"weight"} and isinstance(epsilon, float) and not norm._modules else None
