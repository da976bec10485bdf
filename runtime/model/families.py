"""Which models can verify a tree of drafts, and why the others cannot."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError
from hdtool.runtime.model.attention_masks import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READABLE_LAYERS = (FULL, "sliding_attention", "chunked_attention")
POSITIONS_BY_DISTANCE = ("bloom", "mpt")
"""Families that put the distance between tokens into the attention themselves (ALiBi)."""

HIGH_PRECISION_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.1
"""How far tree logits may lie from plain ones, in standard deviations of the logits. Where a model
ignores the mask or the positions, its logits are off by tenths of one, and at most nodes."""


def refuse_by_configuration(config: Any) -> None:
    """Raise for kinds of models that cannot work, before their weights are loaded."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(kind, "is an encoder-decoder: hdtool drafts for decoder-only models")
    text = config.get_text_config(decoder=True)
    if kind in POSITIONS_BY_DISTANCE or getattr(text, "alibi", False):
        raise _refusal(kind, "uses ALiBi: it derives distances from the order of the tokens, not from position ids")
    foreign = [layer for layer in getattr(text, "layer_types", None) or () if layer not in READABLE_LAYERS]
    if foreign:
        raise _refusal(kind, f"has {foreign[0]} layers, whose state cannot step back from a rejected draft")


def refuse_by_class(model: PreTrainedModel) -> None:
    """Raise for models whose code shows that they cannot work."""
    kind = model.config.model_type
    if getattr(model, "_is_stateful", False):
        raise _refusal(kind, "keeps a recurrent state, which cannot step back from a rejected draft")
    accepted = inspect.signature(model.forward).parameters
    for needed, why in (
        ("position_ids", "takes no position ids, so it cannot place the nodes of a tree"),
        ("past_key_values", "takes no key-value cache"),
        ("attention_mask", "takes no attention mask"),
    ):
        if needed not in accepted:
            raise _refusal(kind, why)


def refuse_by_logits(kind: str, of_tree: torch.Tensor, plain: torch.Tensor, rounding: float | None = None) -> None:
    """Raise if a model did not give the nodes of a tree the logits of their plain paths."""
    if distance := strays(of_tree, plain, rounding):
        raise _refusal(kind, f"does not follow tree masks and position ids (its logits are off by {distance})")


def strays(found: torch.Tensor, expected: torch.Tensor, rounding: float | None = None) -> str:
    """How far logits lie from those expected, if that is more than rounding explains, else nothing.

    Quantised layers round more than the type of the logits tells; ``rounding`` is what was measured of them.

    Judged at the median node: a mixture of experts in low precision may send a single token to
    another expert and still be right, but a model that ignores masks is wrong nearly everywhere.
    """
    precise = expected.dtype in (torch.float32, torch.float64) and rounding is None
    tolerance = HIGH_PRECISION_TOLERANCE if precise else LOW_PRECISION_TOLERANCE
    distance = apart(found, expected).median().item()
    # Each of the two may be off by as much, in opposite directions.
    return "" if distance <= max(tolerance, 2 * (rounding or 0)) else f"{distance:.2g} sigma"


def apart(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far the logits of each row are, in standard deviations."""
    scale = expected.float().std(dim=-1).clamp_min(1e-12)
    return (found.float() - expected.float()).abs().amax(dim=-1) / scale


def _refusal(kind: str, reason: str) -> FamilyError:
    return FamilyError(f"models of type {kind!r} cannot be used: this one {reason}")


def context_limit(config: Any, prompt_length: int) -> int | None:
    """The longest context that the model takes, in tokens; None where it has no end.

    LongRoPE models turn all positions differently once the context outgrows a first length, which
    rewrites the past; a conversation stays on the side of that switch where its prompt is.
    """
    text = config.get_text_config(decoder=True)
    longest: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        switch = rope.get("original_max_position_embeddings")
        if switch and prompt_length <= switch:
            return int(switch)
    return longest
