"""Layers whose weights are quantised: which they are, and what they do to rows that are computed beside others."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from hdtool.data.errors import FamilyError
from hdtool.runtime.model.families import HIGH_PRECISION_TOLERANCE, apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOUD = 100.0
"""How much larger the numbers of a neighbour are that a row must not hear."""
HEARD = 1e-2
"""Part of a row's result that a neighbour may change: several times what bfloat16 rounds, less than the 1.2 to 1.9 %
that outliers shared with it do in LLM.int8(), and far less than a shared scale does."""


def has_plain_weight(layer: Module) -> bool:
    """Whether a layer multiplies by numbers as torch itself has them; libraries put classes of their own there."""
    weight: Any = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return False
    return type(weight).__module__.startswith("torch.") and weight.is_floating_point() and weight.itemsize > 1


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of numbers that a weight is made of: one, or those in a class of a library's own."""
    if type(weight).__module__.startswith("torch.") or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [getattr(weight, name) for name in names]


def quantised_layers(model: PreTrainedModel) -> dict[str, Module]:
    """The layers that multiply by quantised weights, by their names."""
    # Some libraries keep their weights under other names.
    named = "weight" if getattr(model.config, "quantization_config", None) is None else "in_features"
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "in_features") and hasattr(layer, named) and not has_plain_weight(layer)
    }


@torch.inference_mode()
def refuse_dependent_rows(model: PreTrainedModel, device: torch.device) -> None:
    """Raise if a row's result depends on the rows beside it, as where one scale serves all activations of a pass.

    What the model says of a token would then depend on the drafts in the tree around it.
    """
    for name, layer in quantised_layers(model).items():
        if (heard := _heard(layer, model.dtype, device)) > HEARD:
            raise FamilyError(
                f"models of type {model.config.model_type!r} cannot be used as this one is quantised: {name} scales "
                f"its input over all tokens of a pass, so drafts would change the answer (by {heard:.0%} there): "
                "quantise activations row by row (torchao: granularity=PerRow()), or the weights alone"
            )


def _heard(layer: Any, dtype: torch.dtype, device: torch.device) -> float:
    """How much of a row's result another row changes, by a trial."""
    places = [tensor.device for tensor in chain(layer.parameters(), layer.buffers())]
    there = places[0] if places and places[0].type != "meta" else device
    row = torch.cos(torch.arange(layer.in_features, device=there) * 0.7)
    row[0] = 5.0  # coarse steps for the rest, and yet no outlier
    rows = torch.stack([row, LOUD * row.flip(0)]).to(dtype)
    alone, beside = layer(rows[None, :1])[0, 0].double(), layer(rows[None])[0, 0].double()
    return float((beside - alone).norm() / alone.norm().clamp_min(1e-12))


@torch.inference_mode()
def rounding_told(model: PreTrainedModel, paths: torch.Tensor, at_once: torch.Tensor) -> float:
    """How far apart logits lie, in standard deviations, that rounding alone tells apart; said if it is worth it.

    ``at_once`` is what the paths gave, each read in one pass. Read token by token they differ by rounding only, which
    a layer that quantises its input makes larger than the type of the logits lets expect.
    """
    read, found = None, []
    for tokens in paths.split(1, dim=1):
        out = model(input_ids=tokens, past_key_values=read, use_cache=True)
        read = out.past_key_values
        found.append(out.logits[:, -1])
    rounding = apart(torch.stack(found, dim=1), at_once).max().item()
    if rounding > HIGH_PRECISION_TOLERANCE:
        print(
            f"note: this quantised model rounds its logits by {rounding:.2g} standard deviations: where two tokens are "
            "as close as that, the drafts beside them may decide; hdtool verify counts such near ties",
            file=sys.stderr,
        )
    return rounding
