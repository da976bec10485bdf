"""Describes rotary positions, windows, per-layer inputs, embeddings and logits; checks norms and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.func import functional_call
from torch.nn import Module
from torch.nn.functional import gelu, relu, silu

from hdtool.runtime.model.pass_inputs import FULL, HYBRID, WITHOUT_MASK, AttentionWindow

if TYPE_CHECKING:
    from hdtool.runtime.program.model_parts import EngineSupport, ModelParts

Matmul = TypeVar("Matmul", bound=Module)
GATE, ACTIVATION, OUT, NORM = "per_layer_input_gate", "act_fn", "per_layer_projection", "post_per_layer_input_norm"
LAYER_INPUT_MODULES = frozenset({GATE, ACTIVATION, OUT, NORM})
"""Names of the layer modules that add the per-layer input to hidden states."""
EMBEDDING, PROJECTION, PROJECTION_NORM = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
DECODER_INPUT_MODULES = frozenset({EMBEDDING, PROJECTION, PROJECTION_NORM})
"""Names of the decoder modules that compute the per-layer inputs."""


@dataclass(frozen=True)
class InputParts(Generic[Matmul]):
    """The modules that add a layer's per-layer input to the hidden states after the MLP."""

    gate: Matmul
    out: Matmul
    activation_module: Module
    norm: Module

    @property
    def width(self) -> int:
        return int(self.gate.out_features)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerInputs(Generic[Matmul]):
    """Computes the per-layer inputs from a separate token embedding and a projection of the main embedding."""

    decoder: Module
    embedding: Any
    projection: Matmul
    norm: Any
    scale: float
    """Factor of the projection, which is normalized afterwards."""
    input_scale: float
    """Factor of the sum of the normalized projection and the token embedding."""

    @torch.inference_mode()
    def of(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the per-layer inputs ``[batch, tokens, layers, width]``, computed by Transformers' code.

        ``embedded`` holds the main embeddings ``[batch, tokens, hidden]`` of ``ids``.
        """
        decoder: Any = self.decoder
        inputs: torch.Tensor = decoder.project_per_layer_inputs(embedded, decoder.get_per_layer_inputs(ids, embedded))
        return inputs


def input_parts(layer: Module) -> InputParts[Any] | None:
    """Return the modules that add a layer's per-layer input, or None if the layer has no such input."""
    modules = layer._modules
    if modules.get(GATE) is None:
        return None
    return InputParts(*(layer.get_submodule(name) for name in (GATE, OUT, ACTIVATION, NORM)))


def layer_inputs(decoder: Any, layers: int, width: int, support: EngineSupport[Matmul]) -> LayerInputs[Matmul] | None:
    """Return the decoder's modules for per-layer inputs; None if modules are missing or the engine can't use them."""
    embedding, projection, norm = (decoder._modules.get(name) for name in (EMBEDDING, PROJECTION, PROJECTION_NORM))
    scale: Any = getattr(decoder, "per_layer_model_projection_scale", None)
    input_scale: Any = getattr(decoder, "per_layer_input_scale", None)
    if embedding is None or not support.is_linear(projection) or norm is None or not support.is_embedding(embedding):
        return None
    out_features = layers * width
    fits = (
        embedding.weight.shape[1] == projection.out_features == out_features
        and projection.bias is None
        and isinstance(scale, float)
        and isinstance(input_scale, float)
        and set(norm._parameters) == {"weight"}
        and norm.weight.shape == (width,)
        and support.is_readable(norm.weight)
        and not any("forward" in vars(module) for module in (decoder, embedding, norm))
    )
    return LayerInputs(decoder, embedding, projection, norm, scale, input_scale) if fits else None


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "relu2": lambda rows: relu(rows).square(),
}
MAGNITUDES = torch.tensor([[1e-3], [1.0]])
"""Magnitudes of the rows on which norms are compared; for the smaller one, epsilon affects the result."""


class Rotary(NamedTuple):
    """Cosines and sines that rotate a head, or only its first part if they are narrower than the head."""

    cos: torch.Tensor
    """``[tokens, width]``."""
    sin: torch.Tensor
    """``[tokens, width]``; negated for the first element of each pair."""
    is_interleaved: bool = False
    """True if pairs are adjacent elements, False if they are one element of each half."""
    splits_pairs: bool = False
    """True if pairs are adjacent elements that rotation writes to different halves."""

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> Rotary:
        """Convert the cosines and sines that a Transformers rotary module returns, each with two equal halves."""
        half = cos.shape[1] // 2
        first, second = -sin[:, :half], sin[:, half:]
        if not is_interleaved:
            return cls(cos.contiguous(), torch.cat((first, second), dim=1))
        pairs = torch.stack((first, second), dim=2)
        return cls(cos[:, :half].repeat_interleave(2, dim=1), pairs.flatten(1), is_interleaved=True)


def rotary_of(parts: ModelParts[Any], hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> Rotary:
    """Return the cosines and sines for layers of type ``kind``, as computed by the model's rotary module.

    Raise a ``NotImplementedError`` if the width of the cosines and sines doesn't fit a head.
    """
    embeddings = cast(Any, parts.rotary)(hidden, positions, *filter(None, [kind]))
    if isinstance(embeddings, torch.Tensor):  # complex numbers
        embeddings = embeddings.real, embeddings.imag
    cos, sin = (part.flatten(0, 1) for part in embeddings)
    kind_of_rotary = parts.family.rotary
    if kind_of_rotary.has_paired_tables:
        cos, sin = (torch.cat((part[:, ::2], part[:, ::2]), dim=1).float() for part in (cos, sin))
    width, layer = cos.shape[1], parts.attending[0]
    if parts.family.attention.varies_heads:
        layer = parts.layers[position_kinds(parts).index(kind)]
    rotated = layer.rotary_width
    if 2 * width == rotated and kind_of_rotary.has_half_tables:
        cos, sin, width = torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1), 2 * width
    if width > rotated or width % 2 or (width < rotated and not kind_of_rotary.is_partial):
        raise NotImplementedError("rotary positions for a part of a head")
    rotary = Rotary.of(cos, sin, is_interleaved=kind_of_rotary.is_interleaved)
    return rotary._replace(splits_pairs=kind_of_rotary.splits_pairs)


def position_kinds(parts: ModelParts[Any]) -> list[str]:
    """Return, for each layer, the layer type to pass to the rotary module; empty strings if the module takes none."""
    has_several = parts.rotary is not None and isinstance(cast(Any, parts.rotary).rope_type, dict)
    return list(cast(Any, parts.decoder).config.layer_types) if has_several else [""] * len(parts.layers)


def rotary_kinds(parts: ModelParts[Any]) -> list[str | None]:
    """Return, for each layer, the layer type to pass to the rotary module; None for layers without rotary positions."""
    rotates, kinds = parts.family.rotary.rotates, position_kinds(parts)
    return [
        kind if layer.attention and rotates(layer.attention) else None
        for layer, kind in zip(parts.layers, kinds, strict=True)
    ]


def windows_of_layers(config: Any, windows: Sequence[AttentionWindow]) -> list[AttentionWindow] | None:
    """Return each layer's window, from ``windows`` by layer type; return None if any is chunked or a type unknown."""
    by_kind = {window.kind: window for window in windows}
    if any(window.chunk for window in by_kind.values()):
        return None
    number = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [windows[0].kind] * number
    by_kind |= {kind: AttentionWindow(kind) for kind in WITHOUT_MASK if kind in kinds}
    if FULL in by_kind:
        by_kind[HYBRID] = by_kind[FULL]
    return [by_kind[kind] for kind in kinds] if by_kind.keys() >= set(kinds) else None


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Scales a model's embeddings, and scales and softcaps its logits."""

    multiplier: float
    divisor: float
    factor: float
    softcap: float | None

    @classmethod
    def of(cls, parts: ModelParts[Any]) -> EmbeddingAndHead:
        ends, config = parts.family.ends, cast(Any, parts.decoder).config
        softcap = getattr(config, ends.logit_softcap) if ends.logit_softcap else None
        return cls(
            float(getattr(parts.decoder, ends.embedding)) if ends.embedding else 1.0,
            float(getattr(config, ends.logit_divisor)) if ends.logit_divisor else 1.0,
            float(getattr(config, ends.logit_factor)) if ends.logit_factor else 1.0,
            softcap,
        )

    def embedded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def bounded(self, logits: torch.Tensor) -> torch.Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.softcap is None else (logits / self.softcap).tanh_().mul_(self.softcap)


@torch.inference_mode()
def norms_and_activations_match(parts: ModelParts[Any], device: torch.device) -> bool:
    """Return True if a model's norm and activation modules compute what the model's family describes.

    The compared rows are float32 regardless of the weights' dtype, so that rounding doesn't hide a difference. Gated
    norms of mixers aren't compared.
    """
    kind, expected, actual = parts.family.norm, [], []
    norms = [(norm, layer.epsilon) for layer in parts.layers for norm in layer.norms]
    norms += [(norm, part.epsilon) for layer in parts.layers if (part := layer.latent) for norm in part.norms]
    ends = [(norm, parts.epsilon) for norm in (parts.norm, *([parts.inputs.norm] if parts.inputs else ()))]
    weighted = [(norm, epsilon, kind.offset + cast(Any, norm).weight.float()) for norm, epsilon in [*norms, *ends]]
    unweighted = [(layer.value_norm, layer.epsilon, layer.width) for layer in parts.layers if layer.value_norm]
    unit_weighted = [(norm, epsilon, torch.ones(width, device=device)) for norm, epsilon, width in unweighted]
    for norm, epsilon, weight in [*weighted, *unit_weighted]:
        rows = torch.linspace(-2, 3, weight.shape[-1], dtype=torch.float32, device=device)[None] * MAGNITUDES.to(device)
        rows = rows if weight.dim() == 1 else rows[:, None]
        shifted = rows - rows.mean(-1, keepdim=True) if kind.is_centered else rows
        scale = (shifted.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        bias = norm.bias.float() if kind.has_bias else 0.0
        expected.append(shifted * scale * weight + bias)
        # PyTorch's LayerNorm can't read float32 rows with a 16-bit weight.
        actual.append(functional_call(norm, {name: part.float() for name, part in norm.named_parameters()}, (rows,)))
    activations = {(module, layer.activation) for layer in parts.layers if (module := layer.activation_module)}
    activations |= {(layer.inputs.activation_module, layer.activation) for layer in parts.layers if layer.inputs}
    for activation, name in activations:
        rows = torch.linspace(-9, 9, 99, dtype=torch.float32, device=device)
        expected.append(ACTIVATIONS[name](rows))
        actual.append(activation(rows))
    return all(map(torch.allclose, actual, expected, repeat(1e-4), repeat(1e-5)))
