"""Replaces the attention of transformers' layers by hdtool's Triton kernels in passes over draft trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engines.reference.operations import HeadLayout
from hdtool.runtime.model.pass_inputs import AttentionMask, AttentionWindow
from hdtool.runtime.model.transformers_internals import attention_by

if TYPE_CHECKING:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.model.pass_inputs import StepTensors

NAME = "hdtool_tree"
SUPPORTED_ARGUMENTS = {"scaling", "sliding_window", "softcap", "s_aux"}
IGNORED_ARGUMENTS = {
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "use_cache",
}  # fmt: skip
"""Attention arguments that don't affect a pass over a tree."""


class TreeAttention:
    """Replaces a model's attention in passes over trees.

    The model gets one-element masks, whose only use is to identify the attention window of a layer.
    """

    def __init__(self, operations: TritonOperations, windows: list[AttentionWindow]) -> None:
        self._operations, self._windows = operations, windows
        self._window_of: dict[int, AttentionWindow] = {}
        """Attention windows by the address of their mask's memory."""
        self.calls = 0

    @contextmanager
    def replacing(self, model: Any, step: StepTensors) -> Iterator[AttentionMask]:
        """Replace the model's attention within this block; yield the masks to pass to the model."""
        self._operations.begin(step, 0)
        window_masks = [torch.zeros((1, 1, 1, 1), device=step.length.device) for _ in self._windows]
        self._window_of = {memory_of(mask): window for mask, window in zip(window_masks, self._windows, strict=True)}
        masks: dict[str, torch.Tensor | None] = {
            window.kind: mask for mask, window in zip(window_masks, self._windows, strict=True)
        }
        self.calls = 0
        token = CURRENT_ATTENTION.set(self)
        try:
            with attention_by(model, NAME, attend):
                yield masks if len(masks) > 1 else next(iter(masks.values()))
        finally:
            CURRENT_ATTENTION.reset(token)

    def move(self, tensors: list[torch.Tensor]) -> None:
        """Move the keys and values of accepted paths to their final positions."""
        self._operations.move(tensors)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute attention of queries ``[slots, heads, rows, width]``; return ``[slots, rows, heads, width]``.

        Raise a ``NotImplementedError`` for unknown ``options``, or if a head's keys or values aren't contiguous.
        """
        slots, heads, rows, width = query.shape
        unknown = (
            {name for name, number in options.items() if number is not None} - SUPPORTED_ARGUMENTS - IGNORED_ARGUMENTS
        )
        if unknown or any(part.stride()[2:] != (part.shape[3], 1) for part in (key, value)):
            raise NotImplementedError(f"attention with {sorted(unknown)}, or to copies of the cache")
        self.calls += 1
        scale = options.get("scaling")
        layout = HeadLayout(
            heads,
            key.shape[1],
            width,
            width**-0.5 if scale is None else float(scale),
            self._window_of[memory_of(mask)],
            options.get("softcap"),
            options.get("s_aux"),
        )
        queries = query.transpose(1, 2).reshape(slots * rows, heads * width)
        return self._operations.attention(queries, (key, value), layout).view(slots, rows, heads, -1)


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which the tensor's slices share."""
    return tensor.untyped_storage().data_ptr()


CURRENT_ATTENTION: ContextVar[TreeAttention] = ContextVar("the attention of the pass that runs")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the current ``TreeAttention``; Transformers calls this as an attention function."""
    return CURRENT_ATTENTION.get().attend(query, key, value, attention_mask, options), None
