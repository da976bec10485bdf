"""Quantized layers: finding them, testing that rows of a pass are independent, and measuring their rounding."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from hdtool.data.errors import FamilyError
from hdtool.runtime.kernels.linear import has_plain_weight
from hdtool.runtime.model.families import HIGH_PRECISION_TOLERANCE, distances
from hdtool.runtime.model.library import passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEIGHBOR_SCALE = 100.0
"""Perturbation scale of the row-independence test."""
DEPENDENCE_TOLERANCE = 1e-2
"""Relative change of a row that another row may cause: several times the rounding of bfloat16, less than the 1.2 to
1.9 % that shared outliers cause in LLM.int8(), and far less than a shared scale causes."""


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a weight: itself, or those inside a library's tensor subclass."""
    if type(weight).__module__.startswith("torch.") or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name) for name in names]


def quantized_layers(model: PreTrainedModel) -> dict[str, Module]:
    """The layers with quantized weights, by name."""
    # Some libraries store their weights under other names.
    named = "weight" if getattr(model.config, "quantization_config", None) is None else "in_features"
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "in_features") and hasattr(layer, named) and not has_plain_weight(layer)
    }


@torch.inference_mode()
def refuse_dependent_rows(model: PreTrainedModel, device: torch.device) -> None:
    """Raise if the output of a row depends on other rows of the pass, as with one activation scale per tensor.

    The logits of a token would then depend on the drafts in the tree.
    """
    for name, layer in quantized_layers(model).items():
        if (dependence := _dependence(layer, model.dtype, device)) > DEPENDENCE_TOLERANCE:
            raise FamilyError(
                f"models of type {model.config.model_type!r} cannot be used as this one is quantized: {name} scales "
                f"its input over all tokens of a pass, so drafts would change the answer (by {dependence:.0%} here): "
                "quantize activations row by row (torchao: granularity=PerRow()), or the weights alone"
            )


def _dependence(layer: Any, dtype: torch.dtype, device: torch.device) -> float:
    """The relative change of a row's output if another row is added to the pass."""
    places = [tensor.device for tensor in chain(layer.parameters(), layer.buffers())]
    place = places[0] if places and places[0].type != "meta" else device
    row = torch.cos(torch.arange(layer.in_features, device=place) * 0.7)
    row[0] = 5.0  # coarsens the quantization of the others without being an outlier
    rows = torch.stack([row, NEIGHBOR_SCALE * row.flip(0)]).to(dtype)
    alone, with_neighbor = layer(rows[None, :1])[0, 0].double(), layer(rows[None])[0, 0].double()
    return float((with_neighbor - alone).norm() / alone.norm().clamp_min(1e-12))


@torch.inference_mode()
def measure_rounding(model: PreTrainedModel, paths: torch.Tensor, at_once: torch.Tensor) -> float:
    """Measure the rounding of a model's logits, in standard deviations; print a note if it is large.

    ``at_once`` are the logits of ``paths``, each read in one pass. Read token by token they differ by rounding only,
    which is larger than the dtype suggests if layers quantize their input.
    """
    found = [out.logits[:, -1] for out in passes(model, paths.split(1, dim=1))]
    rounding = distances(torch.stack(found, dim=1), at_once).max().item()
    if rounding > HIGH_PRECISION_TOLERANCE:
        print(
            f"note: this model rounds its logits by {rounding:.2g} standard deviations: drafts may change "
            "the choice between two tokens as close as that; hdtool verify counts such near ties",
            file=sys.stderr,
        )
    return rounding
