"""Attention of the library's layers to a cache and a tree, by the kernels of the fused pass instead of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engines.cuda.operations import HeadLayout
from hdtool.runtime.model.attention_masks import AttentionWindow, Mask
from hdtool.runtime.model.library import attention_by

if TYPE_CHECKING:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.model.step_input import StepTensors

NAME = "hdtool_tree"
HANDLED = {"scaling", "sliding_window", "softcap", "s_aux"}
WITHOUT_EFFECT = {
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "use_cache",
}  # fmt: skip
"""Arguments of attention that change nothing in a pass over a tree."""


class TreeAttention:
    """Replaces attention in passes over trees; the models get masks that only name the window of a layer."""

    def __init__(self, operations: TritonOperations, windows: list[AttentionWindow]) -> None:
        self._operations, self._windows = operations, windows
        self._window_of: dict[int, AttentionWindow] = {}
        """By the memory of the mask."""
        self.calls = 0

    @contextmanager
    def replacing(self, model: Any, step: StepTensors) -> Iterator[Mask]:
        """In this block the model attends here; yields its masks."""
        self._operations.begin(step, 0)
        own = [torch.zeros((1, 1, 1, 1), device=step.length.device) for _ in self._windows]
        self._window_of = {memory_of(mask): window for mask, window in zip(own, self._windows, strict=True)}
        masks: dict[str, torch.Tensor | None] = {
            window.kind: mask for mask, window in zip(own, self._windows, strict=True)
        }
        self.calls = 0
        token = CURRENT.set(self)
        try:
            with attention_by(model, NAME, attend):
                yield masks if len(masks) > 1 else next(iter(masks.values()))
        finally:
            CURRENT.reset(token)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        """Attention ``[slots, rows, heads, width]`` of queries ``[slots, heads, rows, width]``."""
        slots, heads, rows, width = query.shape
        unknown = {name for name, number in given.items() if number is not None} - HANDLED - WITHOUT_EFFECT
        if unknown or any(part.stride()[2:] != (part.shape[3], 1) for part in (key, value)):
            raise NotImplementedError(f"attention with {sorted(unknown)}, or to copies of the cache")
        self.calls += 1
        scale = given.get("scaling")
        layout = HeadLayout(
            heads,
            key.shape[1],
            width,
            width**-0.5 if scale is None else float(scale),
            self._window_of[memory_of(mask)],
            given.get("softcap"),
            given.get("s_aux"),
        )
        queries = query.transpose(1, 2).reshape(slots * rows, heads * width)
        return self._operations.attention(queries, (key, value), layout).view(slots, rows, heads, -1)


def memory_of(tensor: torch.Tensor) -> int:
    """Names the memory of a tensor, which its slices share."""
    return tensor.untyped_storage().data_ptr()


CURRENT: ContextVar[TreeAttention] = ContextVar("the attention of the pass that runs")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the library calls."""
    return CURRENT.get().attend(query, key, value, attention_mask, given), None
