"""Attention masks for a draft tree after an accepted context (tree attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

Mask = torch.Tensor | dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class AttentionWindow:
    """The attention window of the layers of one kind."""

    kind: str
    """The name of this kind of layer in the model's configuration."""
    window: int | None = None
    """Size of a sliding window, the query token included."""
    chunk: int | None = None
    """Size of the chunks of chunked attention."""

    def sees_all(self, length: int) -> bool:
        """Whether a context of ``length`` tokens lies in the window as a whole."""
        return (self.window is None or length <= self.window) and (self.chunk is None or length <= self.chunk)

    def visible(self, related: Any, query: Any, key: Any) -> Any:
        """Which ``related`` key positions are in the window of which query positions, as arrays or tensors."""
        if self.window is not None:
            related = related & (key > query[:, None] - self.window)
        if self.chunk is not None:
            related = related & (key // self.chunk == query[:, None] // self.chunk)
        return related


FULL = "full_attention"


def windows_of(config: Any) -> list[AttentionWindow]:
    """The attention windows of a model, from its configuration."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [AttentionWindow("sliding_attention", window=window) if window else AttentionWindow(FULL)]
    sizes = {
        FULL: AttentionWindow(FULL),
        "sliding_attention": AttentionWindow("sliding_attention", window=window),
        "chunked_attention": AttentionWindow("chunked_attention", chunk=getattr(config, "attention_chunk_size", None)),
    }
    return [sizes[kind] for kind in dict.fromkeys(kinds)]


class MaskBuffer:
    """A reused float32 buffer for masks; columns of a fully visible context are never rewritten."""

    def __init__(self) -> None:
        self._values = np.zeros((LARGEST_TREE + 1, 0), np.float32)
        self._last = 0, 0
        """The number of rows and the context length of the last mask."""

    def mask(self, parents: npt.NDArray[np.int32], length: int, mask_value: float) -> torch.Tensor:
        """The mask of a tree ``[1, 1, rows, length + rows]``, valid until the next call."""
        rows = len(parents) + 1
        if self._values.shape[1] < length + rows:
            self._values, self._last = np.zeros((LARGEST_TREE + 1, 2 * (length + rows)), np.float32), (0, 0)
        _hide_non_ancestors(self._values, *self._last, parents, length, mask_value)
        self._last = rows, length
        return torch.from_numpy(self._values[None, None, :rows, : length + rows])


def tree_mask(
    tree: DraftTree,
    length: int,
    windows: list[AttentionWindow],
    dtype: torch.dtype,
    device: torch.device,
    buffer: MaskBuffer | None = None,
) -> Mask:
    """The additive mask ``[1, 1, rows, length + rows]`` for the root and the nodes of a tree.

    A model with one kind of layer gets one mask, a model with several kinds one for each. A mask in ``buffer`` is
    valid until the buffer's next use.
    """
    if len(windows) == 1 and not len(tree) and windows[0].sees_all(length + 1):
        return None
    buffer = buffer or MaskBuffer()
    if not len(tree) and all(window.sees_all(length + 1) for window in windows):
        return {window.kind: _no_mask(length, dtype, device) for window in windows}
    masks = {window.kind: _additive(tree, length, window, dtype, device, buffer) for window in windows}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def continuation_mask(
    rows: int, length: int, windows: list[AttentionWindow], dtype: torch.dtype, device: torch.device
) -> Mask:
    """The causal mask ``[1, 1, rows, length + rows]`` for ``rows`` tokens of a prompt after ``length`` kept ones."""
    positions = torch.arange(length + rows).numpy()
    new = positions[length:]
    masks = {}
    for window in windows:
        hidden = torch.from_numpy(~window.visible(positions <= new[:, None], new, positions)).to(device)
        mask = torch.zeros((1, 1, *hidden.shape), dtype=dtype, device=device)
        masks[window.kind] = mask.masked_fill_(hidden, torch.finfo(dtype).min)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def batch_mask(
    trees: Sequence[DraftTree],
    lengths: Sequence[int],
    windows: list[AttentionWindow],
    dtype: torch.dtype,
    device: torch.device,
) -> Mask:
    """The mask ``[trees, 1, rows, longest + rows]`` for trees after contexts of different ``lengths``.

    Trees are padded to the size of the largest. The logits of padding are unused, but a row must not be fully
    masked, so padding attends to the first token.
    """
    rows = max(map(len, trees)) + 1
    mask_value = torch.finfo(dtype).min
    if (
        len(windows) == 1
        and windows[0].sees_all(max(lengths) + rows)
        and dtype == torch.float32
        and device.type == "cpu"
    ):
        values = np.empty((len(trees), 1, rows, max(lengths) + rows), np.float32)
        parents = np.concatenate([tree.parents for tree in trees])
        _fill_batch(values[:, 0], parents, np.array([len(tree) for tree in trees]), np.array(lengths), mask_value)
        return torch.from_numpy(values)
    masks, buffer = {}, MaskBuffer()
    for window in windows:
        mask = torch.full((len(trees), 1, rows, max(lengths) + rows), mask_value, dtype=dtype, device=device)
        mask[..., 0] = 0.0
        for slot, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            own = len(tree) + 1
            mask[slot, :, :own, : length + own] = _additive(tree, length, window, dtype, device, buffer)[0]
        masks[window.kind] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def device_mask(
    ancestor_mask: torch.Tensor,
    positions: torch.Tensor,
    length: torch.Tensor,
    extent: int,
    windows: list[AttentionWindow],
    dtype: torch.dtype,
) -> Mask:
    """The mask ``[1, 1, rows, extent]``, computed on the device from ancestor bit masks.

    Its shape does not depend on the ``length`` of the context. Padding rows attend to the context and the root, so
    that no row is fully masked.
    """
    columns = torch.arange(extent, device=length.device)
    place = columns - length
    nodes = (ancestor_mask[:, None] >> (place - 1).clamp(0, LARGEST_TREE - 1)) & 1
    related = (place <= 0) | ((nodes == 1) & (place <= LARGEST_TREE))
    rows = len(ancestor_mask)
    column_positions = torch.where(place < 0, columns, positions[place.clamp(0, rows - 1)])
    mask_value = torch.finfo(dtype).min
    masks = {}
    for window in windows:
        visible = window.visible(related, positions, column_positions)
        mask = torch.zeros((1, 1, rows, extent), dtype=dtype, device=length.device)
        masks[window.kind] = mask.masked_fill_(~visible, mask_value)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _additive(
    tree: DraftTree, length: int, window: AttentionWindow, dtype: torch.dtype, device: torch.device, buffer: MaskBuffer
) -> torch.Tensor:
    rows, mask_value = len(tree) + 1, torch.finfo(dtype).min
    if not window.sees_all(length + rows):
        visible = np.ones((rows, length + rows), np.bool_)
        visible[:, length:] = tree.ancestor_mask
        positions = length + tree.depths
        visible = window.visible(visible, positions, np.concatenate([np.arange(length), positions]))
        hidden = torch.from_numpy(~visible).to(device)
        return torch.zeros((1, 1, *hidden.shape), dtype=dtype, device=device).masked_fill_(hidden, mask_value)
    if dtype == torch.float32 and device.type == "cpu":
        return buffer.mask(tree.parents, length, mask_value)
    # The whole context is visible: only the tree's part of the mask is sent to the device.
    mask = torch.zeros((1, 1, rows, length + rows), dtype=dtype, device=device)
    mask.narrow(3, length, rows).masked_fill_(torch.from_numpy(~tree.ancestor_mask).to(device), mask_value)
    return mask


@compiled
def _hide_non_ancestors(
    values: npt.NDArray[np.float32],
    shown: int,
    start: int,
    parents: npt.NDArray[np.int32],
    length: int,
    mask_value: float,
) -> None:
    """Show the square of the last mask, ``shown`` rows from column ``start`` on, and hide in that of a new one."""
    values[:shown, start : start + shown] = 0.0
    rows = len(parents) + 1
    for row in range(rows):
        above = parents[row - 1] + 1 if row > 0 else 0
        for column in range(rows):
            values[row, length + column] = values[above, length + column] if 0 < row > column else mask_value
        values[row, length + row] = 0.0


@compiled
def _fill_batch(
    values: npt.NDArray[np.float32],
    parents: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    mask_value: float,
) -> None:
    """Write the masks of several trees, whose parents follow each other; padding sees the first token alone."""
    values[:] = mask_value
    values[:, :, 0] = 0.0
    first = 0
    for slot in range(len(sizes)):
        own, length = sizes[slot] + 1, lengths[slot]
        values[slot, :own, :length] = 0.0
        _hide_non_ancestors(values[slot], 0, 0, parents[first : first + sizes[slot]], length, mask_value)
        first += sizes[slot]


def _no_mask(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((1, 1, 1, length + 1), dtype=dtype, device=device)
