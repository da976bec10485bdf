"""Who may look at whom: attention masks for a draft tree behind an accepted context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from hdtool.runtime.tree import LARGEST_TREE, DraftTree

Mask = torch.Tensor | dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class AttentionWindow:
    """How far back the layers of one kind look."""

    kind: str
    """The name that the model's configuration gives to this kind of layer."""
    window: int | None = None
    """Sliding: only the last so many tokens, the own one included."""
    chunk: int | None = None
    """Chunked: only tokens of the same stretch of so many positions."""

    def sees_all(self, length: int) -> bool:
        """Whether nothing of a context of ``length`` tokens is out of reach."""
        return length <= min(size for size in (self.window, self.chunk, length) if size is not None)

    def allows(self, query: npt.NDArray[np.int64], key: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which key positions are within reach of which query positions, lineage aside."""
        query, key = query[:, None], key[None, :]
        allowed = np.ones((query.shape[0], key.shape[1]), np.bool_)
        if self.window is not None:
            allowed &= key > query - self.window
        if self.chunk is not None:
            allowed &= key // self.chunk == query // self.chunk
        return allowed


FULL = "full_attention"


def windows_of(config: Any) -> list[AttentionWindow]:
    """The kinds of layers that a model has, from its configuration."""
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
    """Masks in float32, written one over the other: of a context that is seen whole, nothing is written anew."""

    def __init__(self) -> None:
        self._numbers = np.zeros((LARGEST_TREE + 1, 0), np.float32)
        self._last = 0, 0
        """Rows of the tree whose mask stands here, and the length of the context before it."""

    def mask(self, parents: npt.NDArray[np.int32], length: int, hidden_at: float) -> torch.Tensor:
        """That of a tree ``[1, 1, rows, length + rows]``; the next one takes its place."""
        rows = len(parents) + 1
        if self._numbers.shape[1] < length + rows:
            self._numbers = np.zeros((LARGEST_TREE + 1, 2 * (length + rows)), np.float32)
        else:
            _clear(self._numbers, *self._last)
        _hide_strangers(self._numbers, parents, length, hidden_at)
        self._last = rows, length
        return torch.from_numpy(self._numbers[None, None, :rows, : length + rows])


def tree_mask(
    tree: DraftTree,
    length: int,
    windows: list[AttentionWindow],
    dtype: torch.dtype,
    device: torch.device,
    sheet: MaskBuffer | None = None,
) -> Mask:
    """The additive mask ``[1, 1, rows, length + rows]`` for the root and the nodes of a tree.

    One mask serves a model with one kind of layer; a model that mixes kinds takes one for each. It may be written
    on a ``sheet``, and then stands until the next one is.
    """
    sheet = sheet or MaskBuffer()
    if not len(tree) and all(reach.sees_all(length + 1) for reach in windows):
        return {reach.kind: _nothing_hidden(length, dtype, device) for reach in windows} if len(windows) > 1 else None
    masks = {reach.kind: _additive(tree, length, reach, dtype, device, sheet) for reach in windows}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def batch_mask(
    trees: Sequence[DraftTree],
    lengths: Sequence[int],
    windows: list[AttentionWindow],
    dtype: torch.dtype,
    device: torch.device,
) -> Mask:
    """The mask ``[trees, 1, rows, longest + rows]`` for trees behind contexts of different ``lengths``.

    Trees are filled up to the size of the largest: what is said of these rows nobody reads, but they must
    see something, so they see the first token.
    """
    rows = max(map(len, trees)) + 1
    hidden_at = torch.finfo(dtype).min
    masks, sheet = {}, MaskBuffer()
    for reach in windows:
        mask = torch.full((len(trees), 1, rows, max(lengths) + rows), hidden_at, dtype=dtype, device=device)
        mask[..., 0] = 0.0
        for slot, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            own = len(tree) + 1
            mask[slot, :, :own, : length + own] = _additive(tree, length, reach, dtype, device, sheet)[0]
        masks[reach.kind] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def device_mask(
    ancestor_mask: torch.Tensor,
    positions: torch.Tensor,
    length: torch.Tensor,
    extent: int,
    windows: list[AttentionWindow],
    dtype: torch.dtype,
) -> Mask:
    """The mask ``[1, 1, rows, extent]``, computed where the tensors are, from a tree's lineage as bits of its nodes.

    Its shape does not depend on the ``length`` of the context. Rows that stand for no node see the context and
    the root, so that there is something to see.
    """
    columns = torch.arange(extent, device=length.device)
    place = columns - length
    nodes = (ancestor_mask[:, None] >> (place - 1).clamp(0, LARGEST_TREE - 1)) & 1
    related = (place <= 0) | ((nodes == 1) & (place <= LARGEST_TREE))
    rows = len(ancestor_mask)
    stands_at = torch.where(place < 0, columns, positions[place.clamp(0, rows - 1)])
    hidden_at = torch.finfo(dtype).min
    masks = {}
    for reach in windows:
        visible = related
        if reach.window is not None:
            visible = visible & (stands_at > positions[:, None] - reach.window)
        if reach.chunk is not None:
            visible = visible & (stands_at // reach.chunk == positions[:, None] // reach.chunk)
        mask = torch.zeros((1, 1, rows, extent), dtype=dtype, device=length.device)
        masks[reach.kind] = mask.masked_fill_(~visible, hidden_at)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _additive(
    tree: DraftTree, length: int, reach: AttentionWindow, dtype: torch.dtype, device: torch.device, sheet: MaskBuffer
) -> torch.Tensor:
    rows, hidden_at = len(tree) + 1, torch.finfo(dtype).min
    if not reach.sees_all(length + rows):
        visible = np.ones((rows, length + rows), np.bool_)
        visible[:, length:] = tree.ancestor_mask
        positions = length + tree.depths
        visible &= reach.allows(positions, np.concatenate([np.arange(length), positions]))
        hidden = torch.from_numpy(~visible).to(device)
        return torch.zeros((1, 1, *hidden.shape), dtype=dtype, device=device).masked_fill_(hidden, hidden_at)
    if dtype == torch.float32 and device.type == "cpu":
        return sheet.mask(tree.parents, length, hidden_at)
    # Of the context all is seen: only what the tree hides is sent to the device.
    mask = torch.zeros((1, 1, rows, length + rows), dtype=dtype, device=device)
    mask.narrow(3, length, rows).masked_fill_(torch.from_numpy(~tree.ancestor_mask).to(device), hidden_at)
    return mask


@njit(cache=True, nogil=True)
def _clear(numbers: npt.NDArray[np.float32], rows: int, length: int) -> None:
    for row in range(rows):
        numbers[row, length : length + rows] = 0.0


@njit(cache=True, nogil=True)
def _hide_strangers(
    numbers: npt.NDArray[np.float32], parents: npt.NDArray[np.int32], length: int, hidden_at: float
) -> None:
    rows = len(parents) + 1
    for row in range(rows):
        above = parents[row - 1] + 1 if row > 0 else 0
        for column in range(rows):
            numbers[row, length + column] = numbers[above, length + column] if 0 < row > column else hidden_at
        numbers[row, length + row] = 0.0


def _nothing_hidden(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((1, 1, 1, length + 1), dtype=dtype, device=device)
