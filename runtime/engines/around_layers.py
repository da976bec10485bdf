"""What surrounds the layers of a model that is described: rotary positions, windows, and what is done to its ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.nn import Module
from torch.nn.functional import gelu, silu

from hdtool.runtime.model.pass_inputs import AttentionWindow

if TYPE_CHECKING:
    from hdtool.runtime.engines.model_parts import Kind, ModelParts
    from hdtool.runtime.model.target import Target

Matmul = TypeVar("Matmul", bound=Module)
GATE, ACTIVATION, OUT, NORM = "per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm"
OF_LAYER = frozenset({GATE, ACTIVATION, OUT, NORM})
"""Modules of a layer that has an input of its own."""
EMBEDDING, PROJECTION, PROJECTION_NORM = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
OF_DECODER = frozenset({EMBEDDING, PROJECTION, PROJECTION_NORM})
"""Modules of the decoder that make the inputs of all layers."""


@dataclass(frozen=True)
class InputParts(Generic[Matmul]):
    """What a layer adds to hidden states, of its own input, after its MLP."""

    gate: Matmul
    out: Matmul
    activates: Module
    norm: Module

    @property
    def width(self) -> int:
        return int(self.gate.out_features)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerInputs(Generic[Matmul]):
    """What makes the inputs of all layers: an embedding of the token, and a projection of the usual one."""

    decoder: Module
    embedding: Any
    projection: Matmul
    norm: Any
    scale: float
    """The factor of projections."""
    share: float
    """The factor of what both make together."""

    @torch.inference_mode()
    def of(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The inputs ``[batch, tokens, layers, width]``, which the library's own code computes."""
        decoder: Any = self.decoder
        found: torch.Tensor = decoder.project_per_layer_inputs(embedded, decoder.get_per_layer_inputs(ids, embedded))
        return found


def input_parts(layer: Module) -> InputParts[Any] | None:
    """What a layer does with an input of its own; None if it has none."""
    own = layer._modules
    if own.get(GATE) is None:
        return None
    return InputParts(*(layer.get_submodule(name) for name in (GATE, OUT, ACTIVATION, NORM)))


def layer_inputs(decoder: Any, layers: int, width: int, kind: Kind[Matmul]) -> LayerInputs[Matmul] | None:
    """What makes inputs of a width for so many layers; None for modules of other shapes or kinds."""
    embedding, projection, norm = (decoder._modules.get(name) for name in (EMBEDDING, PROJECTION, PROJECTION_NORM))
    scale: Any = getattr(decoder, "per_layer_model_projection_scale", None)
    share: Any = getattr(decoder, "per_layer_input_scale", None)
    if embedding is None or not kind.multiplies(projection) or norm is None or not kind.embeds(embedding):
        return None
    numbers = layers * width
    fits = (
        embedding.weight.shape[1] == projection.out_features == numbers
        and projection.bias is None
        and isinstance(scale, float)
        and isinstance(share, float)
        and set(norm._parameters) == {"weight"}
        and norm.weight.shape == (width,)
        and kind.fits(norm.weight)
        and not any("forward" in vars(module) for module in (decoder, embedding, norm))
    )
    return LayerInputs(decoder, embedding, projection, norm, scale, share) if fits else None


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}
MIXING = ("conv", "linear_attention", "mamba")
"""Kinds of layers that mix tokens by a state."""
SIZES = torch.tensor([[1e-3], [1.0]])
"""Sizes of the rows by which norms are compared: in the smaller one, the epsilon counts."""


class Rotary(NamedTuple):
    """Rotary positions of a head, or of its first part if they are narrower."""

    cos: torch.Tensor
    """``[tokens, width]``."""
    sin: torch.Tensor
    """Negative for the first number of each pair."""
    is_interleaved: bool = False
    """Whether a pair are two numbers side by side, and not one of each half."""

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> Rotary:
        """From cosines and sines by halves, as the library's modules give them."""
        half = cos.shape[1] // 2
        first, second = -sin[:, :half], sin[:, half:]
        if not is_interleaved:
            return cls(cos.contiguous(), torch.cat((first, second), dim=1))
        pairs = torch.stack((first, second), dim=2)
        return cls(cos[:, :half].repeat_interleave(2, dim=1), pairs.flatten(1), is_interleaved=True)


def rotary_of(parts: ModelParts[Any], hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> Rotary:
    """The cosines and sines of one kind of layers, which the model's own module computes."""
    found = cast(Any, parts.rotary)(hidden, positions, *filter(None, [kind]))
    cos, sin = (part.flatten(0, 1) for part in found)
    width, layer = cos.shape[1], parts.attending
    if parts.family.varies_heads:
        layer = parts.layers[kinds_of_positions(parts).index(kind)]
    if 2 * width == layer.width and parts.family.has_half_tables:
        cos, sin, width = torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1), 2 * width
    if width > layer.width or width % 2 or (width < layer.width and not parts.family.is_partial):
        raise NotImplementedError("rotary positions for a part of a head")
    return Rotary.of(cos, sin, is_interleaved=parts.family.is_interleaved)


def kinds_of_positions(parts: ModelParts[Any]) -> list[str]:
    """The kind of positions that each layer is given; empty where there is but one."""
    several = parts.rotary is not None and isinstance(cast(Any, parts.rotary).rope_type, dict)
    return list(cast(Any, parts.decoder).config.layer_types) if several else [""] * len(parts.layers)


def rotary_kinds(parts: ModelParts[Any]) -> list[str | None]:
    """The kind of the rotary positions of each layer, None for a layer that does not use any."""
    rotates, kinds = parts.family.rotates, kinds_of_positions(parts)
    return [
        kind if layer.mixer is None and rotates(layer.attention) else None
        for layer, kind in zip(parts.layers, kinds, strict=True)
    ]


def windows_of_layers(target: Target) -> list[AttentionWindow] | None:
    """The attention window of each layer; None if one has chunks, or attends in another way."""
    by_kind = {window.kind: window for window in target.stock.windows}
    if any(window.chunk for window in by_kind.values()):
        return None
    number = int(target.config.num_hidden_layers)
    kinds = getattr(target.config, "layer_types", None) or [target.stock.windows[0].kind] * number
    by_kind |= {kind: AttentionWindow(kind) for kind in MIXING if kind in kinds}
    return [by_kind[kind] for kind in kinds] if by_kind.keys() >= set(kinds) else None


@dataclass(frozen=True)
class Ends:
    """What a model does to its embeddings and its logits."""

    multiplier: float
    divisor: float
    softcap: float | None

    @classmethod
    def of(cls, parts: ModelParts[Any]) -> Ends:
        family, config = parts.family, cast(Any, parts.decoder).config
        softcap = getattr(config, family.logit_softcap) if family.logit_softcap else None
        return cls(
            float(getattr(parts.decoder, family.embedding)) if family.embedding else 1.0,
            float(getattr(config, family.logit_divisor)) if family.logit_divisor else 1.0,
            softcap,
        )

    def embedded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def bounded(self, logits: torch.Tensor) -> torch.Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap is None else (logits / self.softcap).tanh_().mul_(self.softcap)


@torch.inference_mode()
def small_parts_hold(parts: ModelParts[Any], device: torch.device) -> bool:
    """Whether the norms and activations of a model compute what its description says, exactly.

    They take rows in float32 whatever the dtype of the weights, so that no rounding hides a difference.
    """
    kind, expected, found = parts.family.norm, [], []
    norms = [(norm, layer.epsilon) for layer in parts.layers for norm in layer.norms]
    ends = [(norm, parts.epsilon) for norm in (parts.norm, *([parts.inputs.norm] if parts.inputs else ()))]
    weighed = [(norm, epsilon, kind.offset + cast(Any, norm).weight.float()) for norm, epsilon in [*norms, *ends]]
    bare = [(layer.value_norm, layer.epsilon, layer.width) for layer in parts.layers if layer.value_norm]
    plain = [(norm, epsilon, torch.ones(width, device=device)) for norm, epsilon, width in bare]
    for norm, epsilon, weight in [*weighed, *plain]:
        rows = torch.linspace(-2, 3, len(weight), dtype=torch.float32, device=device)[None] * SIZES.to(device)
        scale = (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        expected.append(rows * scale * weight)
        found.append(norm(rows))
    activations = {(module, layer.activation) for layer in parts.layers if (module := layer.activates)}
    activations |= {(layer.inputs.activates, layer.activation) for layer in parts.layers if layer.inputs}
    for activation, name in activations:
        rows = torch.linspace(-9, 9, 99, dtype=torch.float32, device=device)
        expected.append(ACTIVATIONS[name](rows))
        found.append(activation(rows))
    return all(map(torch.allclose, found, expected, repeat(1e-4), repeat(1e-5)))
