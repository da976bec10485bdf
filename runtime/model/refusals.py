"""Decides which models can verify draft trees, and how long their contexts may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError
from hdtool.runtime.core.tolerances import distances, tolerance_of
from hdtool.runtime.model.pass_inputs import ALIASES, CHUNKED, FULL, SLIDING, WITHOUT_MASK
from hdtool.runtime.model.transformers_internals import cache_name, is_stateful

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READABLE_LAYERS = {FULL, SLIDING, CHUNKED, *WITHOUT_MASK, *(name for names in ALIASES.values() for name in names)}
USE_GENERATE = "Use generate of transformers without hdtool"
"""Advice for users whose model is refused."""
POSITIONS_BY_DISTANCE = ("bloom", "mpt")
"""Model families with ALiBi, whose attention derives distances from the order of tokens and ignores position ids."""

PROMPT_FULL_ATTENTION = "reference_sliding_attention"
"""Type of layers that attend to all prompt tokens, but only to those answer tokens that are within a window."""


def refuse_by_configuration(config: Any) -> None:
    """Raise a ``FamilyError`` if a model's configuration is unsupported; this needs no weights."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(kind, f"is an encoder-decoder: hdtool drafts for decoder-only models. {USE_GENERATE}")
    text = config.get_text_config(decoder=True)
    kept, longest = getattr(text, "keep_window_size", None), getattr(text, "max_position_embeddings", None)
    if kept and (longest is None or kept < longest):
        reason = f"attends to its {kept:,} best keys, and its keep_window_size is less than its context"
        raise refusal(kind, f"{reason}: which of equal keys it takes depends on the pass. {USE_GENERATE}")


def without_trees(config: Any) -> str:
    """Return why a model with this configuration cannot verify trees, or an empty string if it may be able to."""
    kind, text = config.model_type, config.get_text_config(decoder=True)
    if kind in POSITIONS_BY_DISTANCE or getattr(text, "alibi", False):
        return "uses ALiBi: it derives distances from the order of the tokens, not from position ids"
    foreign = [layer for layer in getattr(text, "layer_types", None) or () if layer not in READABLE_LAYERS]
    return f"has {foreign[0]} layers, whose cache cannot be rolled back after a rejected draft" if foreign else ""


def refuse_trees(model: PreTrainedModel, *, positions: bool, mask: bool) -> None:
    """Raise a ``FamilyError`` if a model's configuration or ``forward`` arguments rule out trees.

    ``positions`` and ``mask`` say whether the model accepts position ids, which recurrent models don't need, and an
    attention mask. A refused model may still verify chains.
    """
    kind = model.config.model_type
    if reason := without_trees(model.config):
        raise refusal(kind, reason)
    if not positions and not is_stateful(model):
        raise refusal(kind, "takes no position ids, so it cannot place the nodes of a tree")
    if not mask:
        raise refusal(kind, "takes no attention mask")


def refuse_by_class(model: PreTrainedModel) -> None:
    """Raise a ``FamilyError`` if the model's ``forward`` takes no KV cache."""
    if cache_name(model) is None:
        raise refusal(
            model.config.model_type,
            f"takes no key-value cache: each step would read the whole context. {USE_GENERATE}",
        )


def refuse_by_logits(kind: str, of_tree: torch.Tensor, plain: torch.Tensor, rounding: float | None = None) -> None:
    """Raise a ``FamilyError`` if the logits of tree nodes differ from those of plain decoding along their paths."""
    if distance := deviation(of_tree, plain, rounding):
        raise refusal(kind, f"does not follow tree masks and position ids (its logits are off by {distance})")


def deviation(actual: torch.Tensor, expected: torch.Tensor, rounding: float | None = None) -> str:
    """Describe how far logits are from the expected ones; return an empty string if rounding explains the distance.

    ``rounding`` is the measured error of a model that rounds more than its dtype suggests.

    The median over nodes decides: in low precision, a mixture of experts may route a single token to another expert and
    still be correct, but a model that ignores masks is wrong at nearly all nodes.
    """
    measured = rounding is not None
    tolerance = tolerance_of(torch.bfloat16 if measured else expected.dtype)
    distance = distances(actual, expected).median().item()
    # Actual and expected logits may both have this rounding error, in opposite directions.
    return "" if distance <= max(tolerance, 2 * (rounding or 0)) else f"{distance:.2g} sigma"


def refusal(kind: str, reason: str) -> FamilyError:
    return FamilyError(f"models of type {kind!r} cannot be used: this one {reason}")


def tells_prompts_from_answers(config: Any) -> bool:
    """Return True if some layers attend to all prompt tokens but only to recent answer tokens."""
    return PROMPT_FULL_ATTENTION in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def context_limit(config: Any, prompt_length: int) -> int | None:
    """Return the maximum context length in tokens for a prompt of this length, or None if the model has no limit.

    A LongRoPE model's answer must not cross ``rotary_switch``, where the rotary factors of all positions change.
    """
    switch = rotary_switch(config)
    if switch and prompt_length <= switch:
        return switch
    longest: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest


def rotary_switch(config: Any) -> int | None:
    """Return the length beyond which a LongRoPE model uses other rotary factors; None for other models.

    The factors change for all positions, which invalidates the KV cache, and all rows of a pass use the same factors.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    switch = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return int(switch) if switch else None
