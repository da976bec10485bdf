"""Recognises models of the Llama kind by their structure, and those of families that are described beside it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.nn import Dropout, Embedding, Module, ModuleList

from hdtool.runtime.engines.around_layers import (
    OF_DECODER,
    OF_LAYER,
    PROJECTION,
    InputParts,
    LayerInputs,
    input_parts,
    layer_inputs,
)
from hdtool.runtime.engines.hybrid_families import OF_MIXTURE, MixtureParts, is_known_mixture, mixture_parts
from hdtool.runtime.engines.mixer_parts import MixerParts, mixer_parts
from hdtool.runtime.engines.model_families import LLAMA, Family, family_of, is_of_package, package_of
from hdtool.runtime.kernels.compact_weight import CompactEmbedding

DECODER_PARTS = {"embed_tokens", "layers"}
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}
"""By the names of their classes."""
FIXED_ROTARY = ("default", "linear", "llama3", "proportional", "yarn")
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
    families: Mapping[str, Family] = field(default_factory=dict)
    """What it computes beside layers of the Llama kind."""


@dataclass(frozen=True)
class LayerParts(Generic[Matmul]):
    """The modules of one decoder layer, and its shapes."""

    layer: Module
    attention: Module
    qkv: tuple[Matmul, ...]
    """Queries, keys and values, the latter not where they are the keys; or one that gives all of them."""
    out: Matmul
    """The output of attention."""
    gate_up: tuple[Matmul, ...]
    """Gate and up projection of the MLP, or of the expert that all tokens have, or one that gives both; or none."""
    down: tuple[Matmul, ...]
    """The down projection of that."""
    experts: Module | None
    """The mixture of experts, in place of an MLP or beside it."""
    around: tuple[Module | None, ...]
    """Norms before and after attention, and before and after the MLP."""
    head_norms: tuple[Module, ...]
    """The norms of queries and keys, if there are any."""
    heads: int
    """Heads of keys and values."""
    groups: int
    """Query heads for each key head."""
    width: int
    """Numbers of a head."""
    epsilon: float
    scale: float
    activation: str
    activates: Module | None
    """The module of the activation; none without an MLP, or where a function is called."""
    shared_gate: Matmul | None = None
    """The share of the expert that all tokens have; it is whole without."""
    mixer: MixerParts[Matmul] | None = None
    """What mixes tokens in the place of attention: its inputs are in the place of queries, keys and values."""
    value_norm: Module | None = None
    """A norm of values, without a weight."""
    inputs: InputParts[Matmul] | None = None
    """What the layer does with an input of its own."""
    beside: MixtureParts[Matmul] | None = None
    """A mixture of experts beside the MLP, with norms of its own."""
    factor: torch.Tensor | None = None
    """What the output is multiplied by."""
    source: int | None = None
    """The number of the layer whose keys and values this one reads in the place of its own."""

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        return *self.qkv, self.out, *self.gate_up, *self.down, *self.of_input

    @property
    def of_input(self) -> tuple[Matmul, ...]:
        return (self.inputs.gate, self.inputs.out) if self.inputs else ()

    @property
    def norms(self) -> tuple[Module, ...]:
        """In the order in which a pass comes to them, but those of queries and keys last."""
        beside = self.beside.norms if self.beside else ()
        of_input = self.inputs.norm if self.inputs else None
        return *filter(None, (*self.around, *beside, of_input)), *self.head_norms

    @property
    def hidden(self) -> int:
        return cast(int, self.qkv[0].in_features)

    @property
    def inner(self) -> int:
        """The width of the MLP; 0 without."""
        return cast(int, self.down[0].in_features) if self.down else 0

    @property
    def shape(self) -> tuple[object, ...]:
        """What all layers of a model of the Llama kind have in common."""
        return type(self.layer), len(self.norms), self.inner, *self.shape_of_heads

    @property
    def shape_of_heads(self) -> tuple[object, ...]:
        return self.hidden, self.heads, self.groups, self.width, self.epsilon, self.scale


@dataclass(frozen=True)
class ModelParts(Generic[Matmul]):
    """The modules of a model that consists of an embedding, decoder layers, a norm and an output layer."""

    model: Module
    decoder: Module
    embedding: Any
    layers: list[LayerParts[Matmul]]
    rotary: Module | None
    norm: Any
    head: Matmul
    epsilon: float
    """Of the last norm."""
    family: Family
    inputs: LayerInputs[Matmul] | None = None
    """What makes the inputs of layers beside hidden states."""

    @property
    def attending(self) -> LayerParts[Matmul]:
        """The first layer with attention; all others have heads of the same shapes, unless the family varies them."""
        return next(layer for layer in self.layers if layer.mixer is None)

    @property
    def matmuls(self) -> list[Matmul]:
        of_inputs = [self.inputs.projection] if self.inputs else []
        return [*(matmul for layer in self.layers for matmul in layer.matmuls), *of_inputs, self.head]

    @property
    def placeholders(self) -> list[int]:
        """Ids that stand for something else than text, which the library replaces."""
        found = (getattr(self.model.config, name, None) for name in self.family.placeholders)
        return [token for token in found if isinstance(token, int)]


def model_parts(model: Any, kind: Kind[Matmul]) -> ModelParts[Matmul] | None:
    """The parts of a model; None if it is of another kind."""
    lists = [module for module in model.modules() if type(module) is ModuleList and len(module)]
    found = [(modules, parts) for modules in lists if (parts := _layers_of(modules, kind))]
    if len(found) != 1:
        return None
    ((modules, layers),) = found
    family = _family_of(modules[0], kind)
    owners = [module for module in model.modules() if module._modules.get("layers") is modules]
    widths = {layer.inputs.width if layer.inputs else 0 for layer in layers}
    names = DECODER_PARTS | {family.names.last_norm} | (OF_DECODER if any(widths) else set())
    if len(owners) != 1 or set(owners[0]._modules) - {family.names.rotary} != names:
        return None
    decoder: Any = owners[0]
    embedding, norm = (decoder.get_submodule(name) for name in ("embed_tokens", family.names.last_norm))
    rotary = decoder._modules.get(family.names.rotary)
    head, epsilon = model.get_output_embeddings(), epsilon_of(norm)
    rotates = any(layer.mixer is None and family.rotates(layer.attention) for layer in layers)
    inputs = layer_inputs(decoder, len(layers), max(widths), kind) if any(widths) else None
    if (
        not kind.multiplies(head)
        or len(widths) > 1
        or (inputs is None and any(widths))
        or epsilon is None
        or not all(map(kind.fits, norm.parameters()))
        or (rotates if rotary is None else not _is_fixed(rotary))
        or not kind.embeds(embedding)
        or (family is not LLAMA and not _is_described(model, decoder, family))
    ):
        return None
    return ModelParts(model, decoder, embedding, layers, rotary, norm, head, epsilon, family, inputs)


def _family_of(layer: Module, kind: Kind[Matmul]) -> Family:
    return family_of(layer, kind.families) or LLAMA


def _is_fixed(rotary: Any) -> bool:
    """Whether rotary positions, of each kind of layer if there are several, do not depend on the context."""
    found = getattr(rotary, "rope_type", None)
    kinds = list(found.values()) if isinstance(found, dict) else [found]
    return bool(kinds) and all(each in FIXED_ROTARY for each in kinds)


def _is_described(model: Module, decoder: Any, family: Family) -> bool:
    """Whether what surrounds the layers is the code of their family."""
    names = [name for name in vars(decoder) if OTHER_CODE.search(name) and name != family.embedding]
    ends = (decoder, *(module for name, module in decoder._modules.items() if name not in ("layers", PROJECTION)))
    package = package_of(decoder)
    own = all(is_of_package(one, package) or type(one) in (Embedding, CompactEmbedding) for one in ends)
    return own and not names and family.holds_for(model, decoder.config)


def _layers_of(modules: ModuleList, kind: Kind[Matmul]) -> list[LayerParts[Matmul]]:
    """The parts of all layers of a list; empty if one is of another kind or shape."""
    parts = [_layer_parts(layer, place, kind) for place, layer in enumerate(modules)]
    known = [part for part in parts if part is not None]
    family = _family_of(modules[0], kind)
    is_llama = family is LLAMA
    attending = [part for part in known if part.mixer is None]
    shapes = {part.shape if is_llama else (type(part.layer), *part.shape_of_heads) for part in attending}
    if family.varies_heads:
        shapes = {(type(part.layer), part.scale) for part in attending}
    alike = {(part.hidden, part.epsilon) for part in known}
    if len(known) < len(parts) or len(shapes) != 1 or len(alike) != 1:
        return []
    return _with_sources(known, family)


def _with_sources(layers: list[LayerParts[Matmul]], family: Family) -> list[LayerParts[Matmul]]:
    """The layers with the numbers of those whose keys they read; none if one reads what no layer keeps."""
    kept, found = dict[str, int](), list[LayerParts[Matmul]]()
    for number, layer in enumerate(layers):
        attention: Any = layer.attention
        if not family.keeps:
            found.append(layer)
        elif len(layer.qkv) > 1:
            found.append(layer)
            if getattr(attention, family.keeps):
                kept[attention.layer_type] = number
        else:
            source = kept.get(attention.layer_type)
            if source is None or (layers[source].heads, layers[source].width) != (layer.heads, layer.width):
                return []
            found.append(replace(layer, source=source))
    return found


def _layer_parts(layer: Module, place: int, kind: Kind[Matmul]) -> LayerParts[Matmul] | None:
    family, children = _family_of(layer, kind), layer._modules
    dropouts = {name for name, module in children.items() if family is not LLAMA and _drops_nothing(module)}
    mixes = next((name for name in family.mixers if children.get(name) is not None), "self_attn")
    norms = family.norms if mixes == "self_attn" else family.norms_of_mixers or family.norms
    inputs = input_parts(layer) if family.has_inputs else None
    beside = mixture_parts(layer, family.beside)
    added = family.experts.beside if family.experts and children.get(family.experts.beside) is not None else ""
    further = {*(OF_LAYER if inputs else ()), *(OF_MIXTURE if beside else ())}
    if set(children) - dropouts != {mixes, family.names.mlp, *filter(None, (*norms, added)), *further}:
        return None
    attention, mlp = layer.get_submodule(mixes), layer.get_submodule(family.names.mlp)
    feeds = _feeding_parts(layer.get_submodule(added) if added else mlp, mlp if added else None, kind, family)
    if feeds is None or not _has_known_code(layer, attention, feeds.mlp, family):
        return None
    around = tuple(layer.get_submodule(name) if name else None for name in norms)
    if mixes != "self_attn":
        mixer = mixer_parts(attention, place, kind, family.mixers[mixes])
        return None if mixer is None else _mixing_layer(layer, mixer, feeds, around, kind, family)
    head_norms = tuple(attention.get_submodule(name) for name in family.names.head_norms if name in attention._modules)
    projections, out_name = ("qkv_proj",) if family.joins_qkv else family.projections(attention), family.names.out
    reads_other = not family.joins_qkv and len(projections) == 1
    value_norm = attention._modules.get(family.value_norm) if family.value_norm else None
    normed = {*family.names.head_norms[: len(head_norms)], *([family.value_norm] if value_norm else ())}
    if set(attention._modules) != {*projections, out_name, *normed}:
        return None
    if len(head_norms) not in (0, 1 if reads_other else 2):
        return None
    if (value_norm is None) != (reads_other or not family.value_norm):
        return None
    qkv: tuple[Any, ...] = tuple(getattr(attention, name) for name in projections)
    out: Any = attention.get_submodule(out_name)
    epsilons = {epsilon_of(norm) for norm in (*filter(None, (*around, inputs.norm if inputs else None)), *head_norms)}
    epsilons |= {epsilon_of(value_norm, has_weight=False)} if value_norm else set()
    width, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
    of_input = (inputs.gate, inputs.out) if inputs else ()
    if not all(map(kind.multiplies, (*qkv, out, *of_input))) or len(epsilons) > 1:
        return None
    if inputs and _activation_of(inputs.activates) != feeds.activation:
        return None
    epsilons |= {epsilon_of(norm) for norm in beside.norms} if beside else set()
    if (
        getattr(attention, "layer_idx", None) != place
        or not isinstance(scale, float)
        or not isinstance(width, int)
        or not width
        or width % kind.divisor
    ):
        return None
    # One matrix gives the queries' numbers, which go into the output, and as many keys as values.
    if reads_other:
        keys = out.in_features // int(cast(Any, attention).num_key_value_groups)
    else:
        keys = (qkv[0].out_features - out.in_features) / 2 if family.joins_qkv else qkv[1].out_features
    heads, rest = divmod(keys, width)
    epsilon = epsilons.pop()
    if epsilon is None or rest or not heads or out.in_features % (heads * width):
        return None
    groups = out.in_features // (int(heads) * width)
    parts: LayerParts[Matmul] = LayerParts(
        layer, attention, qkv, out, feeds.gate_up, feeds.down, feeds.experts, around, head_norms,
        int(heads), groups, width, epsilon, scale, feeds.activation, feeds.activates, feeds.shared_gate,
        value_norm=value_norm, inputs=inputs, beside=beside, factor=layer._buffers.get(family.factor),
    )  # fmt: skip
    return parts if _is_complete(parts, kind, family) else None


def _mixing_layer(
    layer: Module,
    mixer: MixerParts[Matmul],
    feeds: FeedingParts,
    around: tuple[Module | None, ...],
    kind: Kind[Matmul],
    family: Family,
) -> LayerParts[Matmul] | None:
    """A layer with another mixer than attention."""
    epsilons = {epsilon_of(norm) for norm in filter(None, around)}
    epsilon = epsilons.pop() if len(epsilons) == 1 else None
    if epsilon is None:
        return None
    parts: LayerParts[Matmul] = LayerParts(
        layer, mixer.module, mixer.inputs, mixer.out, feeds.gate_up, feeds.down, feeds.experts, around, (),
        0, 0, 0, epsilon, 0.0, feeds.activation, feeds.activates, feeds.shared_gate, mixer,
    )  # fmt: skip
    return parts if _is_complete(parts, kind, family) else None


def _drops_nothing(module: Module | None) -> bool:
    return isinstance(module, Dropout) and (module.p == 0 or not module.training)


class FeedingParts(NamedTuple):
    """The MLP or the experts of a layer."""

    mlp: Module | None
    gate_up: tuple[Any, ...] = ()
    down: tuple[Any, ...] = ()
    activation: str = ""
    activates: Module | None = None
    experts: Module | None = None
    shared_gate: Any = None


def _feeding_parts(module: Any, mlp: Module | None, kind: Kind[Any], family: Family) -> FeedingParts | None:
    """The parts of an MLP, or of a mixture of experts and the ``mlp`` beside it; None for any others."""
    described, experts, gate = family.experts, None, None
    if described and type(module).__name__ == described.block:
        experts, gate = module, module._modules.get(described.shared_gate)
        mlp = mlp or module._modules.get(described.shared)
        if mlp is None:
            return FeedingParts(None, experts=experts)
    elif mlp is not None:
        return None
    dense = _mlp_parts(mlp or module, family)
    if dense is None or not all(map(kind.multiplies, (*dense[0], *dense[1], *filter(None, [gate])))):
        return None
    if gate is not None and gate.out_features != 1:
        return None
    return FeedingParts(mlp or module, *dense, experts, gate)


def _mlp_parts(mlp: Module, family: Family) -> tuple[tuple[Any, ...], tuple[Any, ...], str, Module | None] | None:
    """Gate and up projection, down projection, and the activation with its name; None for another MLP."""
    own = family.names
    names, act = ((own.gate_up,), "activation_fn") if family.joins_gate else ((own.gate, own.up), "act_fn")
    act = act if own.activation is None else own.activation
    if set(mlp._modules) != {*names, own.down, *filter(None, [act])}:
        return None
    activates = mlp.get_submodule(act) if act else None
    activation = "silu" if activates is None else _activation_of(activates)
    if activation not in family.activations:
        return None
    return tuple(map(mlp.get_submodule, names)), (mlp.get_submodule(own.down),), activation, activates


def _activation_of(module: Module) -> str:
    """Its name; empty for another one, or one in Python, which rounds after each of its operations."""
    by = getattr(getattr(module, "act", None), "__name__", "")
    return "" if "python" in by else ACTIVATIONS.get(type(module).__name__, "")


def _has_known_code(layer: Module, attention: Module, mlp: Module | None, family: Family) -> bool:
    """Whether modules compute what their names say, as far as their classes, attributes and arguments tell."""
    if "position_ids" in inspect.signature(attention.forward).parameters:
        return False  # it reads positions beside the rotary ones, to scale queries of long contexts for example
    mixes = any(layer._modules.get(name) is attention for name in family.mixers)
    holders = [module for module in (layer, None if mixes else attention, mlp) if module is not None]
    if family is LLAMA:
        return not any(OTHER_CODE.search(name) for module in holders for name in vars(module))
    own = [module for name, module in (*layer._modules.items(), *attention._modules.items()) if "norm" in name]
    package = package_of(layer)
    return (
        all(is_of_package(module, package) for module in (*holders, attention, *own) if module is not None)
        and all(map(family.knows, holders))
        and (mixes or getattr(attention, "is_causal", None) is True)
    )


def _is_complete(parts: LayerParts[Matmul], kind: Kind[Matmul], family: Family) -> bool:
    """Whether all shapes fit and the layer has no other parameters."""
    hidden, inner, keys = parts.hidden, parts.inner, parts.heads * parts.width
    queries = keys * parts.groups
    own_keys = [keys] * (len(parts.qkv) - 1)
    projections = [queries + 2 * keys] if family.joins_qkv else [queries * (1 + family.gates_heads), *own_keys]
    dense = [2 * inner] if family.joins_gate else [inner, inner]
    shapes = [*((rows, hidden) for rows in projections), (hidden, queries)]
    if parts.mixer:  # its own are known to fit
        shapes = [*map(_shape_of, parts.qkv), (hidden, _shape_of(parts.out)[1])]
    shapes += [*((rows, hidden) for rows in dense), (hidden, inner)] if parts.down else []
    shapes += [(parts.inputs.width, hidden), (hidden, parts.inputs.width)] if parts.inputs else []
    of_heads = (queries, keys) if family.norms_all_heads else (parts.width, parts.width)
    widths = [*([hidden] * (len(parts.norms) - len(parts.head_norms))), *of_heads[: len(parts.head_norms)]]
    weights: list[Any] = [norm._parameters["weight"] for norm in parts.norms]
    sinks: Any = parts.attention._parameters.get("sinks") if family.has_sinks else None
    mixer = parts.mixer.module if parts.mixer else None
    beside = parts.beside
    others = parts.experts, mixer, beside.experts if beside else None
    called: tuple[Module, ...] = (*parts.matmuls, *filter(None, others))
    own = {id(tensor) for module in (*called, *parts.norms) for tensor in _tensors_of(module)}
    own |= {id(tensor) for tensor in beside.tensors} if beside else set()
    own |= {id(tensor) for tensor in (sinks, parts.factor) if tensor is not None}
    inside = {id(module) for one in called for module in one.modules()}
    return (
        all(_shape_of(one) == shape for one, shape in zip(parts.matmuls, shapes, strict=True))
        and all(weight.shape == (width,) for weight, width in zip(weights, widths, strict=True))
        and all(map(kind.fits, weights))
        and (not family.has_sinks or (sinks is not None and kind.fits(sinks)))
        and (beside is None or is_known_mixture(beside, parts.layer, hidden, parts.epsilon, kind))
        and (not family.factor or (parts.factor is not None and parts.factor.numel() == 1))
        and {id(tensor) for tensor in _tensors_of(parts.layer)} == own
        and not any("forward" in vars(module) for module in parts.layer.modules() if id(module) not in inside)
    )


def _shape_of(matmul: Any) -> tuple[int, int]:
    return matmul.out_features, matmul.in_features


def _tensors_of(module: Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def epsilon_of(norm: Module, *, has_weight: bool = True) -> float | None:
    """The epsilon of an RMSNorm; None if the module has other parameters."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    is_plain = set(norm._parameters) == ({"weight"} if has_weight else set()) and not norm._modules
    return epsilon if is_plain and isinstance(epsilon, float) else None
