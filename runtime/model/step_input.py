"""The input of a pass over a tree, filled on the host in one call.

A step with fixed shapes has one buffer, which is sent to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.model.cache.kv_cache import MOST_DUE
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

MOVES = MOST_DUE
HEADER = 3 + MOVES
LENGTH, MOVED_TO, MOVED, MOVED_FROM = range(4)
"""Places in the header: length of the context; the first position to which others are moved, how many, and these."""


class StepTensors(NamedTuple):
    """The parts of the buffer on the device."""

    buffer: torch.Tensor
    """``[slots, numbers]``"""
    length: torch.Tensor
    """Length of the context, ``[slots]``."""
    moved_to: torch.Tensor
    """The first position to which others are moved, ``[slots]``."""
    moved_from: torch.Tensor
    """The moved positions, ``[slots, MOVES]``, padded with positions that stay."""
    tokens: torch.Tensor
    positions: torch.Tensor
    """``[slots, rows]``"""
    ancestor_mask: torch.Tensor
    """``[slots, rows]``: a bit for each ancestor node of the row, itself included."""


class StepInput:
    """The buffer on host and device. Padding rows repeat the root; their logits are not used."""

    def __init__(self, device: torch.device, slots: int = 1) -> None:
        size = slots * (HEADER + 3 * (LARGEST_TREE + 1))
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._words: npt.NDArray[np.int64] = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int64, device=device)

    def fill(self, slot: int, tree: DraftTree, rows: int, length: int) -> None:
        """Write the tree of a slot after a context of ``length`` tokens, with nothing to move."""
        _fill(self._words_of(slot, rows), tree.root, tree.tokens, tree.parents, rows, length)

    def move(self, slot: int, rows: int, start: int, path: Sequence[int]) -> None:
        """Add a move of the positions ``start + path`` to ``start`` and after."""
        words = self._words_of(slot, rows)
        words[MOVED_TO], words[MOVED] = start, len(path)
        words[MOVED_FROM:HEADER] = start + np.arange(MOVES)
        words[MOVED_FROM : MOVED_FROM + len(path)] = np.array(path) + start

    def _words_of(self, slot: int, rows: int) -> npt.NDArray[np.int64]:
        size = HEADER + 3 * rows
        return self._words[slot * size : (slot + 1) * size]

    def send(self, slots: int, rows: int) -> None:
        end = slots * (HEADER + 3 * rows)
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def tensors(self, slots: int, rows: int) -> StepTensors:
        buffer = self._device[: slots * (HEADER + 3 * rows)].view(slots, HEADER + 3 * rows)
        tokens, positions, ancestor_mask = buffer[:, HEADER:].view(slots, 3, rows).unbind(1)
        moved_from = buffer[:, MOVED_FROM:HEADER]
        return StepTensors(buffer, buffer[:, LENGTH], buffer[:, MOVED_TO], moved_from, tokens, positions, ancestor_mask)


class TreeInput:
    """Token ids and positions of a pass over a tree, in reused tensors: each new one takes a call of torch."""

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

    def of(self, tree: DraftTree, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and positions ``[1, rows]`` of a tree after a context of ``length`` tokens."""
        ids, positions = self._numbers
        fill_tree(ids, positions, tree.root, tree.tokens, tree.parents, length)
        return self._shaped(1, len(tree) + 1)

    def of_batch(self, trees: Sequence[DraftTree], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of several trees, ``[trees, rows]``; smaller ones are padded with their roots."""
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
            above = HEADER + parents[node] + 1
            words[at] = tokens[node]
            words[at + rows] = words[above + rows] + 1
            words[at + 2 * rows] = words[above + 2 * rows] | (np.int64(1) << np.int64(node))


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
    heads: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    rows: int,
) -> None:
    """``heads`` are the root, the number of nodes and the length of the context of each tree."""
    first = 0
    for slot in range(len(heads)):
        root, nodes, length = heads[slot]
        at = slot * rows
        numbers[0, at : at + rows], numbers[1, at : at + rows] = root, length
        stop = first + nodes
        fill_tree(numbers[0, at:], numbers[1, at:], root, tokens[first:stop], parents[first:stop], length)
        first = stop
