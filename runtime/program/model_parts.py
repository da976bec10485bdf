"""Recognizes models with Llama's structure and models of the other described families."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

import torch
from torch.nn import Dropout, Embedding, Identity, LayerNorm, Module, ModuleList

from hdtool.runtime.caches.kv_cache import LayerShape
from hdtool.runtime.kernels.compact_weight import CompactEmbedding
from hdtool.runtime.program.added_mixture import MIXTURE_MODULES, MixtureParts, is_known_mixture, mixture_parts
from hdtool.runtime.program.attention_parts import with_attention, with_latents
from hdtool.runtime.program.embedding_and_head import (
    DECODER_INPUT_MODULES,
    LAYER_INPUT_MODULES,
    PROJECTION,
    InputParts,
    LayerInputs,
    input_parts,
    layer_inputs,
)
from hdtool.runtime.program.feed_forward import activation_of, feed_forward_parts
from hdtool.runtime.program.latent_parts import LatentParts
from hdtool.runtime.program.llama_like_families import LLAMA, Family, is_of_package, package_of
from hdtool.runtime.program.mixer_parts import MixerParts, epsilon_of, mixer_parts, tensors_of
from hdtool.runtime.program.side_block import SideBlock, modules_of, with_side_block
from hdtool.runtime.program.sublayers import sublayers_of

FIXED_ROTARY = ("default", "linear", "llama3", "proportional", "yarn")
"""Rotary types that don't depend on the context length."""
UNSUPPORTED_ATTRIBUTES = re.compile("multiplier|use_rope|no_rope|nope|clip|softcap")
"""Matches names of attributes that may change what a layer computes, perhaps too little to show in rounded logits."""

Matmul = TypeVar("Matmul", bound=Module)


@dataclass(frozen=True)
class EngineSupport(Generic[Matmul]):
    """Modules, widths and model families that an engine supports."""

    is_linear: Callable[[Any], bool]
    """Tests whether the engine can compute a module as a linear layer."""
    is_readable: Callable[[Any], bool]
    """Tests whether the engine can read a small tensor, such as a norm's weight."""
    is_embedding: Callable[[Module], bool]
    """Tests whether the engine can compute an embedding."""
    divisor: int = 2
    """Head widths and mixer widths must be multiples of this number."""
    families: Mapping[str, Family] = field(default_factory=dict)
    """Supported families besides Llama's, by the name of their package in ``transformers.models``."""
    is_mixer_weight: Callable[[Any], bool] | None = None
    """Tests whether the engine can read a small tensor of a mixer; None if ``is_readable`` tests these as well."""


@dataclass(frozen=True, kw_only=True)
class LayerParts(Generic[Matmul]):
    """The modules and shapes of one decoder layer."""

    layer: Module
    attention: Module | None = None
    """Attention module; if the layer has none, this and ``out`` are None and ``qkv`` is empty."""
    qkv: tuple[Matmul, ...] = ()
    """Query, key and value projections, or one joined matrix.

    Without a value projection, the keys are also the values. With only a query projection, the layer reads the keys and
    values of an earlier layer.
    """
    out: Matmul | None = None
    """Output projection of the attention."""
    gate_up: tuple[Matmul, ...]
    """Gate and up projections, or their joined matrix, of the MLP or shared expert; empty if the layer has neither."""
    down: tuple[Matmul, ...]
    """Down projection of the MLP or shared expert; empty if the layer has neither."""
    experts: Module | None = None
    """Mixture of experts that replaces the MLP or is added to it, unless it is ``added_mixture``; None without one."""
    block_norms: tuple[Module | None, ...]
    """Norms before and after attention, and before and after the MLP; None for each that the layer lacks."""
    head_norms: tuple[Module, ...] = ()
    """Norms of queries and keys; empty if they aren't normalized."""
    heads: int = 0
    """Number of key/value heads: 0 in a layer without attention, 1 with ``latent``."""
    groups: int = 0
    """Query heads per key/value head."""
    width: int = 0
    """Head dimension, or the width of the latent vectors that ``latent`` caches."""
    epsilon: float
    scale: float = 0.0
    activation: str
    activation_module: Module | None = None
    """Module of the MLP's activation; None if there is no MLP or its activation isn't a module."""
    shared_gate: Matmul | None = None
    """Linear layer whose sigmoid scales the shared expert's output; None if the output isn't scaled."""
    mixer: MixerParts[Matmul] | None = None
    """Mixer in place of attention, or besides it if the family ``adds_mixers`` or the layer has a ``side`` block."""
    latent: LatentParts[Matmul] | None = None
    """Further modules of a latent attention, whose input projections ``qkv`` holds; None for other layers."""
    value_norm: Module | None = None
    """Norm of the values, without a weight; None if the values aren't normalized."""
    inputs: InputParts[Matmul] | None = None
    """Modules that add the layer's per-layer input to hidden states; None if the layer has no such input."""
    added_mixture: MixtureParts[Matmul] | None = None
    """Mixture of experts that is added to the MLP and has its own norms; None without one."""
    factor: torch.Tensor | None = None
    """One-element tensor that scales the layer's output; None if the output isn't scaled."""
    side: SideBlock[Matmul] | None = None
    """Further modules of a block that attention and MLP form beside the mixer; None if there is no such block."""
    kv_source: int | None = None
    """Index of the earlier layer whose keys and values this layer reads; None if the layer has its own."""

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        attention = (*self.qkv, self.out) if self.out else ()
        queries = self.latent.queries if self.latent else ()
        others = *self.input_matmuls, *queries, *(self.side.matmuls if self.side else ())
        return *self.mixer_matmuls, *attention, *self.gate_up, *self.down, *others

    @property
    def mixer_matmuls(self) -> tuple[Matmul, ...]:
        return self.mixer.matmuls if self.mixer else ()

    @property
    def input_matmuls(self) -> tuple[Matmul, ...]:
        return (self.inputs.gate, self.inputs.out) if self.inputs else ()

    @property
    def norms(self) -> tuple[Module, ...]:
        """Norms with weights: of the block, the added mixture, the per-layer input, the side block and the heads."""
        added_mixture = self.added_mixture.norms if self.added_mixture else ()
        others = self.inputs.norm if self.inputs else None, self.side.norm if self.side else None
        return *filter(None, (*self.block_norms, *added_mixture, *others)), *self.head_norms

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Heads and widths of the tensors that the layer caches, except a mixer's states."""
        if self.attention is None or self.kv_source is not None:
            return []
        return [(self.heads, self.width), (self.heads, self.latent.rotated if self.latent else self.width)]

    @property
    def rotary_width(self) -> int:
        """Width of the part of a query or key that may be rotated."""
        return self.latent.rotated if self.latent else self.width

    @property
    def hidden(self) -> int:
        return cast(int, self.matmuls[0].in_features)

    @property
    def feeds(self) -> bool:
        """True if the layer has an MLP, experts or both."""
        return bool(self.down) or self.experts is not None

    def factors(self, family: Family) -> dict[str, Any]:
        """Return the factors other than 1 that scale the outputs of matmuls, by name of the matmul.

        ``first`` is the first input projection of the mixer, whose factor may be a tensor; the other names are those of
        ``LayerKind.factors``.
        """
        described = family.layer.factors.items()
        values = {name: [attrgetter(path)(self.layer) for path in paths] for name, paths in described}
        if self.mixer and (factors := self.mixer.input_factors):
            values["first"] = factors
        products = {name: prod(scales) for name, scales in values.items()}
        return {name: product for name, product in products.items() if name == "first" or product != 1.0}

    @property
    def inner(self) -> int:
        """Width of the MLP or shared expert; 0 if the layer has neither."""
        return cast(int, self.down[0].in_features) if self.down else 0

    @property
    def shape(self) -> tuple[object, ...]:
        """Layer class and sizes, which are equal in all layers of a Llama model."""
        return type(self.layer), len(self.norms), self.inner, *self.head_shape

    @property
    def head_shape(self) -> tuple[object, ...]:
        return self.hidden, self.heads, self.groups, self.width, self.epsilon, self.scale


@dataclass(frozen=True)
class ModelParts(Generic[Matmul]):
    """The modules of a model: embedding, decoder layers, final norm and output layer."""

    model: Module
    decoder: Module
    embedding: Any
    layers: list[LayerParts[Matmul]]
    rotary: Module | None
    norm: Any
    head: Matmul
    epsilon: float
    """The final norm's epsilon."""
    family: Family
    inputs: LayerInputs[Matmul] | None = None
    """Computes an additional input for each layer; None if layers read only hidden states."""

    @property
    def attending(self) -> list[LayerParts[Matmul]]:
        """Layers with attention; all have the same head shape unless the family ``varies_heads``."""
        return [layer for layer in self.layers if layer.attention]

    @property
    def matmuls(self) -> list[Matmul]:
        input_projection = [self.inputs.projection] if self.inputs else []
        return [*(matmul for layer in self.layers for matmul in layer.matmuls), *input_projection, self.head]

    @property
    def placeholders(self) -> list[int]:
        """Ids of the tokens that Transformers replaces with image, video or audio embeddings."""
        tokens = (getattr(self.model.config, name, None) for name in self.family.ends.placeholders)
        return [token for token in tokens if isinstance(token, int)]


def model_parts(model: Any, support: EngineSupport[Matmul]) -> ModelParts[Matmul] | None:
    """Return the parts of a model, or None if the engine can't compute the model."""
    lists = [module for module in model.modules() if type(module) is ModuleList and len(module)]
    candidates = [(modules, parts) for modules in lists if (parts := layers_of(modules, support))]
    if len(candidates) != 1:
        return None
    ((modules, layers),) = candidates
    family = _family_of(modules[0], support)
    owners = [module for module in model.modules() if module._modules.get("layers") is modules]
    widths = {layer.inputs.width if layer.inputs else 0 for layer in layers}
    names = {"layers", family.names.embedding, family.names.last_norm}
    names |= DECODER_INPUT_MODULES if any(widths) else set()
    if len(owners) != 1 or set(owners[0]._modules) - {family.names.rotary} - _dropouts(owners[0], family) != names:
        return None
    decoder: Any = owners[0]
    embedding, norm = (decoder.get_submodule(name) for name in (family.names.embedding, family.names.last_norm))
    rotary = decoder._modules.get(family.names.rotary)
    head, epsilon = model.get_output_embeddings(), epsilon_of(norm, family.norm.parameters)
    rotates = any(layer.attention and family.rotary.rotates(layer.attention) for layer in layers)
    inputs = layer_inputs(decoder, len(layers), max(widths), support) if any(widths) else None
    if (
        not support.is_linear(head)
        or len(widths) > 1
        or (inputs is None and any(widths))
        or epsilon is None
        or not all(map(support.is_readable, norm.parameters()))
        or (rotates if rotary is None else not _is_fixed(rotary))
        or not support.is_embedding(embedding)
        or (family is not LLAMA and not _is_described(model, decoder, family))
    ):
        return None
    return ModelParts(model, decoder, embedding, layers, rotary, norm, head, epsilon, family, inputs)


def fits_cache(parts: ModelParts[Any], shapes: Sequence[LayerShape]) -> bool:
    """Return True if the tensors that each layer caches have the heads and widths of ``LayerParts.kept``."""
    return len(shapes) == len(parts.layers) and all(
        [(part.heads, part.width) for part in shape.kept] == layer.kept
        for layer, shape in zip(parts.layers, shapes, strict=True)
    )


def _family_of(layer: Module, support: EngineSupport[Matmul]) -> Family:
    return support.families.get(package_of(layer), LLAMA)


def _is_fixed(rotary: Any) -> bool:
    """Return True if none of the rotary types depends on the context length."""
    types = getattr(rotary, "rope_type", None)
    kinds = list(types.values()) if isinstance(types, dict) else [types]
    return bool(kinds) and all(kind in FIXED_ROTARY for kind in kinds)


def _is_described(model: Module, decoder: Any, family: Family) -> bool:
    """Return True if the modules around the layers, and the model's settings, match the family's description."""
    known = {family.ends.embedding, *family.ends.logit_settings}
    names = [name for name in vars(decoder) if UNSUPPORTED_ATTRIBUTES.search(name) and name not in known]
    others = {"layers", PROJECTION, *_dropouts(decoder, family)}
    ends = (decoder, *(module for name, module in decoder._modules.items() if name not in others))
    package, plain = package_of(decoder), (Embedding, CompactEmbedding, LayerNorm)
    is_known = all(is_of_package(part, package) or type(part) in plain for part in ends)
    return is_known and not names and family.holds_for(model, decoder.config)


def layers_of(modules: ModuleList, support: EngineSupport[Matmul]) -> list[LayerParts[Matmul]]:
    """Return each layer's parts; an empty list if one is unsupported, differs in shape or lacks its ``kv_source``."""
    parts = [_layer_parts(layer, index, support) for index, layer in enumerate(modules)]
    recognized = [part for part in parts if part is not None]
    family = _family_of(modules[0], support)
    is_llama = family is LLAMA
    attending = [part for part in recognized if part.attention]
    shapes = {part.shape if is_llama else (type(part.layer), *part.head_shape) for part in attending}
    if family.attention.varies_heads:
        shapes = {(type(part.layer), part.scale) for part in attending}
    common_shapes = {(part.hidden, part.epsilon) for part in recognized}
    if len(recognized) < len(parts) or len(shapes) > 1 or len(common_shapes) != 1:
        return []
    return _with_sources(recognized, family)


def _with_sources(layers: list[LayerParts[Matmul]], family: Family) -> list[LayerParts[Matmul]]:
    """Return the layers, with ``kv_source`` set on those that read another layer's keys and values.

    Return an empty list if no earlier layer of the same type shares keys of the shape that such a layer needs.
    """
    sources, linked = dict[str, int](), list[LayerParts[Matmul]]()
    for index, layer in enumerate(layers):
        attention: Any = layer.attention
        if not family.attention.shared_kv_attribute:
            linked.append(layer)
        elif len(layer.qkv) > 1:
            linked.append(layer)
            if getattr(attention, family.attention.shared_kv_attribute):
                sources[attention.layer_type] = index
        else:
            source = sources.get(attention.layer_type)
            if source is None or (layers[source].heads, layers[source].width) != (layer.heads, layer.width):
                return []
            linked.append(replace(layer, kv_source=source))
    return linked


def _layer_parts(layer: Module, index: int, support: EngineSupport[Matmul]) -> LayerParts[Matmul] | None:
    family = _family_of(layer, support)
    children, sublayers = modules_of(layer, family), sublayers_of(layer, family)
    if sublayers is None:
        return None
    attention, mixer_module, feed = sublayers
    norms = family.layer.norms if attention else family.layer.norms_of_mixers or family.layer.norms
    inputs = input_parts(layer) if family.layer.has_inputs else None
    added_mixture = mixture_parts(layer, family.layer.added_router)
    extra_mixture = (
        family.experts.added_block if family.experts and children.get(family.experts.added_block) is not None else ""
    )
    extra_modules = {*(LAYER_INPUT_MODULES if inputs else ()), *(MIXTURE_MODULES if added_mixture else ())}
    extra_modules |= {family.side.norm, family.side.out} if family.side and attention else set()
    if set(children) - _dropouts(layer, family) != {
        *(name for name, child in children.items() if child is not None and child in sublayers),
        *filter(None, (*norms, extra_mixture)),
        *extra_modules,
    }:
        return None
    mixture = layer.get_submodule(extra_mixture) if extra_mixture else None
    feed_forward = feed_forward_parts(mixture or feed, feed if mixture else None, support, family)
    if feed_forward is None or not _has_known_code(layer, attention, mixer_module, feed_forward.mlp, family):
        return None
    mixer = mixer_parts(mixer_module, index, support) if mixer_module else None
    if mixer_module and mixer is None:
        return None
    block_norms = tuple(layer.get_submodule(name) if name else None for name in norms)
    epsilons = {
        epsilon_of(norm, family.norm.parameters)
        for norm in filter(None, (*block_norms, inputs.norm if inputs else None))
    }
    epsilons |= {epsilon_of(norm) for norm in added_mixture.norms} if added_mixture else set()
    epsilon = epsilons.pop() if len(epsilons) == 1 else None
    if epsilon is None:
        return None
    if inputs and not (
        all(map(support.is_linear, (inputs.gate, inputs.out)))
        and activation_of(inputs.activation_module) == feed_forward.activation
    ):
        return None
    parts: LayerParts[Matmul] | None = LayerParts(
        layer=layer,
        gate_up=feed_forward.gate_up,
        down=feed_forward.down,
        experts=feed_forward.experts,
        block_norms=block_norms,
        epsilon=epsilon,
        activation=feed_forward.activation,
        activation_module=feed_forward.activation_module,
        shared_gate=feed_forward.shared_gate,
        mixer=mixer,
        inputs=inputs,
        added_mixture=added_mixture,
        factor=layer._buffers.get(family.layer.factor),
    )
    if attention and parts:
        read = with_latents if family.attention.has_latents else with_attention
        parts = read(parts, attention, index, support, family)
        parts = with_side_block(parts, index, support, family.side) if parts and family.side else parts
    return parts if parts and _is_complete(parts, support, family) else None


def _dropouts(module: Module, family: Family) -> set[str]:
    """Return the names of a module's dropouts that drop nothing; an empty set if the family is ``LLAMA``."""
    dropouts = {name: child for name, child in module._modules.items() if isinstance(child, Dropout)}
    return {name for name, child in dropouts.items() if family is not LLAMA and not (child.p and child.training)}


def _has_known_code(
    layer: Module, attention: Module | None, mixer: Module | None, mlp: Module | None, family: Family
) -> bool:
    """Return True if the family describes all code of the modules; for ``LLAMA``, if no attribute is unsupported.

    No family describes attention that takes ``position_ids``.
    """
    if attention and "position_ids" in inspect.signature(attention.forward).parameters:
        return False  # positions have a second use, such as scaling the queries of long contexts
    holders = [module for module in (layer, attention, mlp) if module is not None]
    if family is LLAMA:
        return not any(UNSUPPORTED_ATTRIBUTES.search(name) for module in holders for name in vars(module))
    if family.side and attention:
        holders += map(layer.get_submodule, family.side.holders)
    named = [item for module in (*holders, mixer) if module for item in module._modules.items()]
    norms = [module for name, module in named if "norm" in name and module is not None]
    package = package_of(layer)
    return (
        all(is_of_package(module, package) for module in (*holders, *filter(None, [mixer])))
        and all(is_of_package(norm, package) or type(norm) in (LayerNorm, Identity) for norm in norms)
        and all(map(family.knows, holders))
        and (attention is None or getattr(attention, "is_causal", None) is family.attention.is_causal)
    )


def _is_complete(parts: LayerParts[Matmul], support: EngineSupport[Matmul], family: Family) -> bool:
    """Return True if all shapes match, no ``forward`` is replaced, and every tensor of the layer belongs to a part."""
    hidden, inner, keys, latent = parts.hidden, parts.inner, parts.heads * parts.width, parts.latent
    described = family.attention
    queries = keys * parts.groups
    key_rows = [keys] * (len(parts.qkv) - 1)
    projections = [queries + 2 * keys] if described.joins_qkv else [queries * (1 + described.gates_heads), *key_rows]
    dense = [2 * inner] if family.mlp.joins_gate else [inner] * len(parts.gate_up)
    read = 2 * hidden if parts.side else hidden
    attention_shapes = [*((rows, read) for rows in projections), (hidden, queries)] if parts.attention else []
    if latent:  # latent_parts has checked these shapes
        attention_shapes = [*map(_shape_of, parts.qkv), (hidden, _shape_of(parts.out)[1])]
    shapes = list(map(_shape_of, parts.mixer_matmuls[:-1]))  # checked by mixer_parts
    shapes += [(hidden, _shape_of(parts.mixer.out)[1])] if parts.mixer else []
    shapes += attention_shapes
    shapes += [*((rows, hidden) for rows in dense), (hidden, inner)] if parts.down else []
    shapes += [(parts.inputs.width, hidden), (hidden, parts.inputs.width)] if parts.inputs else []
    shapes += latent.query_shapes if latent else []
    shapes += [(hidden, hidden), *map(_shape_of, parts.side.matmuls[1:])] if parts.side else []
    head_norm_shapes = [*([(read,)] if parts.side else []), *_head_norm_shapes(parts, family)]
    norm_shapes = [(hidden,)] * (len(parts.norms) - len(head_norm_shapes)) + head_norm_shapes
    weights: list[list[Any]] = [[norm._parameters[name] for name in family.norm.parameters] for norm in parts.norms]
    sinks: Any = parts.attention._parameters.get("sinks") if described.has_sinks and parts.attention else None
    mixer = parts.mixer.module if parts.mixer else None
    added_mixture = parts.added_mixture
    others = parts.experts, mixer, added_mixture.experts if added_mixture else None
    latent_modules: tuple[Module, ...] = (latent.expansion, *latent.norms) if latent else ()
    modules: tuple[Module, ...] = (*parts.matmuls, *filter(None, others))
    known_ids = {id(tensor) for module in (*modules, *parts.norms, *latent_modules) for tensor in tensors_of(module)}
    known_ids |= {id(tensor) for tensor in added_mixture.tensors} if added_mixture else set()
    known_ids |= {id(tensor) for tensor in (sinks, parts.factor) if tensor is not None}
    known_ids |= {id(tensor) for tensor in parts.side.tensors} if parts.side else set()
    inside = {id(module) for parent in modules for module in parent.modules()}
    return (
        all(_shape_of(matmul) == shape for matmul, shape in zip(parts.matmuls, shapes, strict=True))
        and all({weight.shape for weight in pair} == {shape} for pair, shape in zip(weights, norm_shapes, strict=True))
        and all(support.is_readable(weight) for pair in weights for weight in pair)
        and (not described.has_sinks or (sinks is not None and support.is_readable(sinks)))
        and (added_mixture is None or is_known_mixture(added_mixture, parts.layer, hidden, parts.epsilon, support))
        and (not family.layer.factor or (parts.factor is not None and parts.factor.numel() == 1))
        and {id(tensor) for tensor in tensors_of(parts.layer)} == known_ids
        and not any("forward" in vars(module) for module in parts.layer.modules() if id(module) not in inside)
    )


def _head_norm_shapes(parts: LayerParts[Any], family: Family) -> list[tuple[int, ...]]:
    heads, width = parts.heads * parts.groups, parts.width
    shapes: tuple[tuple[int, ...], ...] = ((width,), (width,))
    if family.attention.norms_all_heads:
        shapes = (heads * width,), (parts.heads * width,)
    elif family.attention.norms_each_head:
        shapes = (heads, width), (parts.heads, width)
    return list(shapes[: len(parts.head_norms)])


def _shape_of(matmul: Any) -> tuple[int, int]:
    return matmul.out_features, matmul.in_features
