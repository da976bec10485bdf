"""Builds the inputs of passes over draft trees: token ids, positions and tree-attention masks.

Steps with fixed shapes keep their inputs in one buffer, which is sent to the device in a single copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.caches.kv_cache import MAX_DEFERRED_MOVES
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.kernels.compiled import compiled

Mask = torch.Tensor | dict[str, torch.Tensor | None] | None


@dataclass(frozen=True)
class AttentionWindow:
    """The attention window that layers of one kind share."""

    kind: str
    """Name of this kind of layer in the model's configuration."""
    window: int | None = None
    """Size of the sliding window, including the query token; None if there is none."""
    chunk: int | None = None
    """Chunk size of chunked attention; None if it isn't used."""

    def sees_all(self, length: int) -> bool:
        """Return True if a context of ``length`` tokens fits entirely into the window."""
        return (self.window is None or length <= self.window) and (self.chunk is None or length <= self.chunk)

    def visible(self, related: Any, query: Any, key: Any) -> Any:
        """Restrict ``related``, which marks the keys that each query may read, to keys within the query's window.

        ``query`` and ``key`` are positions. All arguments and the result are arrays, or all are tensors.
        """
        if self.window is not None:
            related = related & (key[..., None, :] > query[..., None] - self.window)
        if self.chunk is not None:
            related = related & (key[..., None, :] // self.chunk == query[..., None] // self.chunk)
        return related


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, HYBRID, HYBRID_SLIDING = "indexed_attention", "hybrid", "hybrid_sliding"
WITHOUT_MASK = ("linear_attention", "conv", "dummy", "mamba", "moe", "mlp")
"""Kinds of layers that read no attention mask: recurrences, short convolutions and layers without attention."""
UNMASKED: dict[str, torch.Tensor | None] = dict.fromkeys(("linear_attention", "conv"))
"""Entries for layers that read no mask, added to the mask dictionary of a model with several kinds of layers."""
ALIASES = {FULL: (HYBRID, INDEXED), SLIDING: (HYBRID_SLIDING,)}
"""Other names under which some models look up the mask of a kind, for layers that also have a state or an indexer."""


def windows_of(config: Any) -> list[AttentionWindow]:
    """Return the attention windows that a model's configuration describes."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [AttentionWindow(SLIDING, window=window) if window else AttentionWindow(FULL)]
    chunk = getattr(config, "attention_chunk_size", None)
    by_name = {alias: kind for kind, aliases in ALIASES.items() for alias in aliases}
    windows = {
        FULL: AttentionWindow(FULL),
        SLIDING: AttentionWindow(SLIDING, window=window),
        CHUNKED: AttentionWindow(CHUNKED, chunk=chunk),
    }
    present = dict.fromkeys(by_name.get(kind, kind) for kind in kinds if kind not in WITHOUT_MASK)
    return [windows[kind] for kind in present if kind in windows] or [windows[FULL]]


class MaskBuffer:
    """A float32 buffer reused for the masks of trees; columns of the context, which is fully visible, stay zero."""

    def __init__(self) -> None:
        self._values = np.zeros((LARGEST_TREE + 1, 0), np.float32)
        self._last = 0, 0
        """Number of rows and context length of the last mask."""

    def mask(self, parents: npt.NDArray[np.int32], length: int, mask_value: float) -> torch.Tensor:
        """Return a tree's mask ``[1, 1, rows, length + rows]``, valid until the next call."""
        rows = len(parents) + 1
        if self._values.shape[1] < length + rows:
            self._values, self._last = np.zeros((LARGEST_TREE + 1, 2 * (length + rows)), np.float32), (0, 0)
        hide_non_ancestors(self._values, *self._last, parents, length, mask_value)
        self._last = rows, length
        return torch.from_numpy(self._values[None, None, :rows, : length + rows])


class AttentionMasks:
    """Makes the additive attention masks of a model, given the attention windows of its layers.

    A model with one kind of layer gets a single mask, a model with several kinds a dictionary with a mask per kind.
    """

    def __init__(self, windows: list[AttentionWindow], dtype: torch.dtype, device: torch.device) -> None:
        self._windows, self._dtype, self._device = windows, dtype, device
        self._value = torch.finfo(dtype).min
        self._is_on_host = dtype == torch.float32 and device.type == "cpu"
        self._buffer = MaskBuffer()

    def tree_mask(self, tree: DraftTree, length: int, *, reused: bool = False) -> Mask:
        """Return the mask ``[1, 1, rows, length + rows]`` for the root and nodes of a tree.

        Return None for a bare root if the model has one kind of layer, whose window contains the whole context. With
        ``reused``, the mask is valid until the next call with ``reused``.
        """
        is_bare = not len(tree) and all(window.sees_all(length + 1) for window in self._windows)
        if is_bare and len(self._windows) == 1:
            return None
        if is_bare:
            hidden = torch.zeros((1, length + 1), dtype=torch.bool)
            return self._mask_by_kind(lambda window: self._hiding(hidden))
        buffer = self._buffer if reused else MaskBuffer()
        return self._mask_by_kind(lambda window: self._of_window(tree, length, window, buffer))

    def continuation_mask(self, rows: int, length: int) -> Mask:
        """Return the causal mask ``[1, 1, rows, length + rows]`` of prompt tokens after ``length`` cached ones."""
        return self.causal_mask(torch.arange(length, length + rows, device=self._device), length + rows)

    def causal_mask(self, positions: torch.Tensor, extent: int) -> Mask:
        """Compute the causal mask ``[1, 1, rows, extent]`` of tokens at these ``positions`` of the cache."""
        columns = torch.arange(extent, device=positions.device)
        causal = columns <= positions[:, None]
        return self._mask_by_kind(lambda window: self._hiding(~window.visible(causal, positions, columns)))

    def batch_mask(self, trees: Sequence[DraftTree], lengths: Sequence[int]) -> Mask:
        """Return the mask ``[trees, 1, rows, longest + rows]`` for trees after contexts of different ``lengths``.

        Trees are padded to the size of the largest. The logits of padding rows are unused, but no row may be fully
        masked, so padding attends to the first token.
        """
        rows = max(map(len, trees)) + 1
        shape, windows = (len(trees), 1, rows, max(lengths) + rows), self._windows
        if len(windows) == 1 and windows[0].sees_all(shape[-1]) and self._is_on_host:
            values = np.empty(shape, np.float32)
            parents = np.concatenate([tree.parents for tree in trees])
            _fill_batch(values[:, 0], parents, np.array([len(tree) for tree in trees]), np.array(lengths), self._value)
            return torch.from_numpy(values)
        buffer = MaskBuffer()

        def padded(window: AttentionWindow) -> torch.Tensor:
            mask = torch.full(shape, self._value, dtype=self._dtype, device=self._device)
            mask[..., 0] = 0.0
            for slot, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
                used_rows = len(tree) + 1
                mask[slot, :, :used_rows, : length + used_rows] = self._of_window(tree, length, window, buffer)[0]
            return mask

        return self._mask_by_kind(padded)

    def on_device(
        self, ancestor_mask: torch.Tensor, positions: torch.Tensor, length: torch.Tensor, extent: int
    ) -> Mask:
        """Compute the mask ``[slots, 1, rows, extent]`` on the device, from ancestor bit masks ``[slots, rows]``.

        Its shape does not depend on the contexts' ``length``. Padding rows attend to the context and the root, so that
        no row is fully masked.
        """
        columns = torch.arange(extent, device=length.device).expand(len(length), -1)
        offset = columns - length[:, None]
        related = _related(ancestor_mask, offset)
        tree_positions = positions.gather(1, offset.clamp(0, positions.shape[1] - 1))
        column_positions = torch.where(offset < 0, columns, tree_positions)
        return self._mask_by_kind(lambda window: self._hiding(~window.visible(related, positions, column_positions)))

    def on_device_for_rows(
        self, ancestor_mask: torch.Tensor, positions: torch.Tensor, length: torch.Tensor, extent: int
    ) -> Mask:
        """Compute the mask ``[1, 1, rows, extent]`` of some nodes of a tree, whose other rows are in the cache.

        The arguments are those of ``on_device`` for a single slot, without the root's row. Since the positions of other
        rows are unknown, windows take a node for as many tokens after the root as there are rows between them.
        """
        columns = torch.arange(extent, device=length.device)
        related = _related(ancestor_mask, columns - length)
        return self._mask_by_kind(lambda window: self._hiding(~window.visible(related, positions, columns)))

    def _mask_by_kind(self, mask_of: Callable[[AttentionWindow], torch.Tensor]) -> Mask:
        masks = {window.kind: mask_of(window) for window in self._windows}
        if len(masks) == 1:
            return next(iter(masks.values()))
        return masks | {alias: masks[kind] for kind in masks for alias in ALIASES.get(kind, ())} | UNMASKED

    def _of_window(self, tree: DraftTree, length: int, window: AttentionWindow, buffer: MaskBuffer) -> torch.Tensor:
        rows = len(tree) + 1
        if not window.sees_all(length + rows):
            visible = np.ones((rows, length + rows), np.bool_)
            visible[:, length:] = tree.ancestor_mask
            positions = length + tree.depths
            visible = window.visible(visible, positions, np.concatenate([np.arange(length), positions]))
            return self._hiding(torch.from_numpy(~visible))
        if self._is_on_host:
            return buffer.mask(tree.parents, length, self._value)
        # The whole context is visible: only the tree's part of the mask is sent to the device.
        mask = torch.zeros((1, 1, rows, length + rows), dtype=self._dtype, device=self._device)
        hidden = torch.from_numpy(~tree.ancestor_mask).to(self._device)
        mask.narrow(3, length, rows).masked_fill_(hidden, self._value)
        return mask

    def _hiding(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = hidden.shape if hidden.dim() > 2 else (1, *hidden.shape)
        mask = torch.zeros((shape[0], 1, *shape[1:]), dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden.to(self._device).view(mask.shape), self._value)


def _related(ancestor_mask: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Mark the keys in the context, the root and the ancestors of each row, given the offsets of keys from the root."""
    nodes = (ancestor_mask[..., None] >> (offset - 1).clamp(0, LARGEST_TREE - 1)[..., None, :]) & 1
    return (offset <= 0)[..., None, :] | ((nodes == 1) & (offset <= LARGEST_TREE)[..., None, :])


@compiled
def hide_non_ancestors(
    values: npt.NDArray[np.float32],
    shown: int,
    start: int,
    parents: npt.NDArray[np.int32],
    length: int,
    mask_value: float,
) -> None:
    """Write a tree's mask at column ``length``, after unmasking the columns of the previous tree.

    The previous tree has ``shown`` rows and as many columns, from column ``start`` on.
    """
    values[:shown, start : start + shown] = 0.0
    rows = len(parents) + 1
    for row in range(rows):
        parent_row = parents[row - 1] + 1 if row > 0 else 0
        for column in range(rows):
            values[row, length + column] = values[parent_row, length + column] if 0 < row > column else mask_value
        values[row, length + row] = 0.0


@compiled
def _fill_batch(
    values: npt.NDArray[np.float32],
    parents: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    mask_value: float,
) -> None:
    """Write the masks of several concatenated trees; padding rows see only the first token."""
    values[:] = mask_value
    values[:, :, 0] = 0.0
    first = 0
    for slot in range(len(sizes)):
        rows, length = sizes[slot] + 1, lengths[slot]
        values[slot, :rows, :length] = 0.0
        hide_non_ancestors(values[slot], 0, 0, parents[first : first + sizes[slot]], length, mask_value)
        first += sizes[slot]


MOVES = MAX_DEFERRED_MOVES
HEADER = 3 + MOVES
LENGTH, MOVED_TO, MOVED, MOVED_FROM = range(4)
"""Header indices of the context length and of a move: its first target position, its length and its first source."""


class StepTensors(NamedTuple):
    """The input buffer of a step on the device, and views of its parts."""

    buffer: torch.Tensor
    """The whole buffer, shape ``[slots, numbers]``."""
    length: torch.Tensor
    """Context lengths, shape ``[slots]``."""
    moved_to: torch.Tensor
    """First target position of each slot's move, shape ``[slots]``."""
    moved_from: torch.Tensor
    """Positions to move, shape ``[slots, MOVES]``; padding entries move positions to where they already are."""
    tokens: torch.Tensor
    positions: torch.Tensor
    """Position ids, shape ``[slots, rows]`` as for ``tokens``."""
    ancestor_mask: torch.Tensor
    """Bits of each row's ancestor nodes, itself included, shape ``[slots, rows]``."""


class TransferBuffer:
    """Integers at fixed addresses on the host and on a device, which one copy takes from either to the other."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(words, dtype=torch.int64, device=device)

    def send(self, words: int) -> None:
        """Start copying the first ``words`` integers to the device."""
        self.device[:words].copy_(self.host[:words], non_blocking=True)

    def fetch(self, words: int) -> None:
        """Start copying the first ``words`` integers to the host."""
        self.host[:words].copy_(self.device[:words], non_blocking=True)


class StepInput:
    """The input buffer of steps, on host and device. Padding rows repeat the root; their logits are unused."""

    def __init__(self, device: torch.device, slots: int = 1) -> None:
        self._buffer = TransferBuffer(slots * (HEADER + 3 * (LARGEST_TREE + 1)), device)
        self._words: npt.NDArray[np.int64] = self._buffer.host.numpy()

    def fill(self, slot: int, tree: DraftTree, rows: int, length: int) -> None:
        """Write the tree that follows a slot's context of ``length`` tokens; discard the slot's last ``move``."""
        _fill(self._words_of(slot, rows), tree.root, tree.tokens, tree.parents, rows, length)

    def move(self, slot: int, rows: int, start: int, path: Sequence[int]) -> None:
        """Make the step move the cache positions ``start + path`` to consecutive positions from ``start`` on."""
        words = self._words_of(slot, rows)
        words[MOVED_TO], words[MOVED] = start, len(path)
        words[MOVED_FROM:HEADER] = start + np.arange(MOVES)
        words[MOVED_FROM : MOVED_FROM + len(path)] = np.array(path) + start

    def _words_of(self, slot: int, rows: int) -> npt.NDArray[np.int64]:
        size = HEADER + 3 * rows
        return self._words[slot * size : (slot + 1) * size]

    def send(self, slots: int, rows: int) -> None:
        self._buffer.send(slots * (HEADER + 3 * rows))

    def tensors(self, slots: int, rows: int) -> StepTensors:
        buffer = self._buffer.device[: slots * (HEADER + 3 * rows)].view(slots, HEADER + 3 * rows)
        tokens, positions, ancestor_mask = buffer[:, HEADER:].view(slots, 3, rows).unbind(1)
        moved_from = buffer[:, MOVED_FROM:HEADER]
        return StepTensors(buffer, buffer[:, LENGTH], buffer[:, MOVED_TO], moved_from, tokens, positions, ancestor_mask)


class TreeInput:
    """Writes token ids and positions of trees into reused tensors, which saves torch calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._slots = 0
        self._make_room(1)

    def _make_room(self, slots: int) -> None:
        if slots > self._slots:
            self._slots = slots
            buffer = torch.zeros((2, slots * (LARGEST_TREE + 1)), dtype=torch.int64)
            self._numbers: npt.NDArray[np.int64] = buffer.numpy()
            self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
            self._buffer = buffer

    def tree_inputs(self, tree: DraftTree, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and positions ``[1, rows]`` of a tree after a context of ``length`` tokens."""
        ids, positions = self._numbers
        fill_tree(ids, positions, tree.root, tree.tokens, tree.parents, length)
        return self._shaped(1, len(tree) + 1)

    def batch_inputs(self, trees: Sequence[DraftTree], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and positions ``[trees, rows]`` of several trees, each padded with its root."""
        rows = max(map(len, trees)) + 1
        self._make_room(len(trees))
        _fill_trees(
            self._numbers,
            np.array([(tree.root, len(tree), length) for tree, length in zip(trees, lengths, strict=True)]),
            np.concatenate([tree.tokens for tree in trees]),
            np.concatenate([tree.parents for tree in trees]),
            rows,
        )
        return self._shaped(len(trees), rows)

    def _shaped(self, slots: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (slots, rows) not in self._views:
            ids, positions = self._buffer[:, : slots * rows].view(2, slots, rows)
            self._views[slots, rows] = ids, positions
        ids, positions = self._views[slots, rows]
        return (ids, positions) if self._device is None else (ids.to(self._device), positions.to(self._device))


@compiled
def _fill(
    words: npt.NDArray[np.int64],
    root: int,
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    rows: int,
    length: int,
) -> None:
    words[LENGTH] = words[MOVED_TO] = length
    words[MOVED] = 0
    for move in range(MOVES):
        words[MOVED_FROM + move] = length + move
    for row in range(rows):
        at = HEADER + row
        words[at], words[at + rows], words[at + 2 * rows] = root, length, 0
        if 0 < row <= len(tokens):
            node = row - 1
            parent_at = HEADER + parents[node] + 1
            words[at] = tokens[node]
            words[at + rows] = words[parent_at + rows] + 1
            words[at + 2 * rows] = words[parent_at + 2 * rows] | (np.int64(1) << np.int64(node))


@compiled
def fill_tree(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    root: int,
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    length: int,
) -> None:
    ids[0], positions[0] = root, length
    for node in range(len(tokens)):
        ids[node + 1], positions[node + 1] = tokens[node], positions[parents[node] + 1] + 1


@compiled
def _fill_trees(
    numbers: npt.NDArray[np.int64],
    tree_headers: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    rows: int,
) -> None:
    """Write ids and positions of several trees.

    ``tree_headers`` has each tree's root, number of nodes and context length.
    """
    first = 0
    for slot in range(len(tree_headers)):
        root, nodes, length = tree_headers[slot]
        at = slot * rows
        numbers[0, at : at + rows], numbers[1, at : at + rows] = root, length
        stop = first + nodes
        fill_tree(numbers[0, at:], numbers[1, at:], root, tokens[first:stop], parents[first:stop], length)
        first = stop
