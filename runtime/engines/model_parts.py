"""Recognises models of the Llama kind by their structure: Llama, Mistral, Qwen2, Qwen3 and others like them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch.nn import Module, ModuleList

DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = ("SiLU", "SiLUActivation")
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that do not depend on how long a context is."""
OTHER_CODE = re.compile("multiplier|use_rope|no_rope|nope|clip|softcap")
"""Settings of layers that compute something else. Its effect may be too small for a comparison of rounded logits."""

Matmul = TypeVar("Matmul", bound=Module)


@dataclass(frozen=True)
class Kind(Generic[Matmul]):
    """What an engine computes."""

    multiplies: Callable[[Any], bool]
    """Whether it takes this module as a linear layer."""
    fits: Callable[[Any], bool]
    """Whether it takes this weight of a norm."""
    embeds: Callable[[Module], bool]
    """Whether it takes this embedding."""
    divisor: int = 2
    """A number that divides the width of a head."""


@dataclass(frozen=True)
class LayerParts(Generic[Matmul]):
    """The modules of one decoder layer, and its shapes."""

    layer: Module
    matmuls: tuple[Matmul, ...]
    """Queries, keys, values, the output of attention; gate, up and down projection of the MLP."""
    norms: tuple[Module, ...]
    """Before attention, before the MLP, and of queries and keys if there are any."""
    heads: int
    """Heads of keys and values."""
    groups: int
    """Query heads for each key head."""
    width: int
    """Numbers of a head."""
    epsilon: float
    scale: float

    @property
    def hidden(self) -> int:
        return cast(int, self.matmuls[0].in_features)

    @property
    def inner(self) -> int:
        return cast(int, self.matmuls[4].out_features)

    @property
    def shape(self) -> tuple[object, ...]:
        """What all layers of a model have in common."""
        kinds = type(self.layer), len(self.norms), self.hidden, self.inner
        return *kinds, self.heads, self.groups, self.width, self.epsilon, self.scale


@dataclass(frozen=True)
class ModelParts(Generic[Matmul]):
    """The modules of a model that consists of an embedding, decoder layers, a norm and an output layer."""

    model: Module
    decoder: Module
    embedding: Any
    layers: list[LayerParts[Matmul]]
    rotary: Module
    norm: Any
    head: Matmul
    epsilon: float
    """Of the last norm."""

    @property
    def matmuls(self) -> list[Matmul]:
        return [*(matmul for layer in self.layers for matmul in layer.matmuls), self.head]


def model_parts(model: Any, kind: Kind[Matmul]) -> ModelParts[Matmul] | None:
    """The parts of a model; None if it is of another kind."""
    lists = [module for module in model.modules() if type(module) is ModuleList and len(module)]
    found = [(modules, parts) for modules in lists if (parts := _layers_of(modules, kind))]
    if len(found) != 1:
        return None
    ((modules, layers),) = found
    owners = [module for module in model.modules() if module._modules.get("layers") is modules]
    if len(owners) != 1 or set(owners[0]._modules) != DECODER_PARTS:
        return None
    decoder = owners[0]
    embedding, rotary, norm = (decoder.get_submodule(name) for name in ("embed_tokens", "rotary_emb", "norm"))
    head, epsilon = model.get_output_embeddings(), epsilon_of(norm)
    if (
        not kind.multiplies(head)
        or epsilon is None
        or not all(map(kind.fits, norm.parameters()))
        or getattr(rotary, "rope_type", None) not in FIXED_ROTARY
        or not kind.embeds(embedding)
    ):
        return None
    return ModelParts(model, decoder, embedding, layers, rotary, norm, head, epsilon)


def _layers_of(modules: ModuleList, kind: Kind[Matmul]) -> list[LayerParts[Matmul]]:
    """The parts of all layers of a list; empty if one is of another kind or shape."""
    parts = [_layer_parts(layer, place, kind) for place, layer in enumerate(modules)]
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) and len({part.shape for part in known}) == 1 else []


def _layer_parts(layer: Module, place: int, kind: Kind[Matmul]) -> LayerParts[Matmul] | None:
    if set(layer._modules) != LAYER_PARTS:
        return None
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    head_norms = [name for name in HEAD_NORMS if name in attention._modules]
    activation = type(getattr(mlp, "act_fn", None)).__name__
    known = set(attention._modules) == {*PROJECTIONS, *head_norms} and len(head_norms) in (0, 2)
    if not known or set(mlp._modules) != {*MLP_PARTS, "act_fn"} or activation not in ACTIVATIONS:
        return None
    if any(OTHER_CODE.search(name) for module in (layer, attention, mlp) for name in vars(module)):
        return None
    if "position_ids" in inspect.signature(attention.forward).parameters:
        return None  # it reads positions beside the rotary ones, to scale queries of long contexts for example
    matmuls: list[Any] = [getattr(attention, name) for name in PROJECTIONS]
    matmuls += [getattr(mlp, name) for name in MLP_PARTS]
    norms = [layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")]
    norms += [getattr(attention, name) for name in head_norms]
    epsilons = {epsilon_of(norm) for norm in norms}
    width, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
    if not all(map(kind.multiplies, matmuls)) or len(epsilons) > 1 or not isinstance(scale, float):
        return None
    if (
        getattr(attention, "layer_idx", None) != place
        or not isinstance(width, int)
        or not width
        or width % kind.divisor
    ):
        return None
    heads, rest = divmod(matmuls[1].out_features, width)
    epsilon = epsilons.pop()
    if epsilon is None or rest or not heads or matmuls[0].out_features % (heads * width):
        return None
    groups = matmuls[0].out_features // (heads * width)
    own = cast(tuple[Matmul, ...], tuple(matmuls))
    parts = LayerParts(layer, own, tuple(norms), heads, groups, width, epsilon, scale)
    return parts if _is_complete(parts, kind) else None


def _is_complete(parts: LayerParts[Matmul], kind: Kind[Matmul]) -> bool:
    """Whether all shapes fit and the layer has no other parameters."""
    hidden, inner, keys = parts.hidden, parts.inner, parts.heads * parts.width
    queries = keys * parts.groups
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    widths = [hidden, hidden, parts.width, parts.width][: len(parts.norms)]
    weights: list[Any] = [norm._parameters["weight"] for norm in parts.norms]
    modules: tuple[Module, ...] = (*parts.matmuls, *parts.norms)
    own = {id(tensor) for module in modules for tensor in _tensors_of(module)}
    inside = {id(module) for matmul in parts.matmuls for module in matmul.modules()}
    return (
        all(_shape_of(one) == shape for one, shape in zip(parts.matmuls, shapes, strict=True))
        and all(weight.shape == (width,) for weight, width in zip(weights, widths, strict=True))
        and all(map(kind.fits, weights))
        and {id(tensor) for tensor in _tensors_of(parts.layer)} == own
        and not any("forward" in vars(module) for module in parts.layer.modules() if id(module) not in inside)
    )


def _shape_of(matmul: Any) -> tuple[int, int]:
    return matmul.out_features, matmul.in_features


def _tensors_of(module: Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def epsilon_of(norm: Module) -> float | None:
    """The epsilon of an RMSNorm; None if the module has other parameters."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return epsilon if set(norm._parameters) == {"weight"} and isinstance(epsilon, float) and not norm._modules else None
