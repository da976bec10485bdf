"""Recognises inputs that layers have beside hidden states: for each token and layer, some numbers of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn import Module

if TYPE_CHECKING:
    from hdtool.runtime.engines.model_parts import Kind

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
