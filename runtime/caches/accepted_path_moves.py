"""Moves the cached keys and values of accepted paths: in compiled code on CPUs, with PyTorch on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import types

from hdtool.runtime.kernels.compiled import Array, array_at, compiled

MAX_DEFERRED_MOVES = 16
"""Maximum number of positions that a captured step can move before it computes.

Longer paths are rare and moved immediately.
"""
WORD_SIZE = 2
"""Number of bytes that ``move_on_host`` copies at a time; each cached dtype's size is a multiple of it."""


class TensorLayout(NamedTuple):
    """Address, sizes and byte strides of a tensor ``[rows, 1, heads, positions, width]``, for compiled code."""

    address: int
    rows: int
    row_size: int
    heads: int
    head_size: int
    position_size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        assert tensor.shape[1] == 1 and tensor.stride(4) == 1, "one sequence, whose positions are contiguous"
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return cls(tensor.data_ptr(), tensor.shape[0], strides[0], tensor.shape[2], strides[2], strides[3])


def must_move(path: Sequence[int]) -> bool:
    """Return True if the increasing offsets ``path`` differ from 0, 1, 2 and so on, so that positions must move."""
    return len(path) > 0 and path[-1] != len(path) - 1


@compiled
def move_on_host(
    address: int,
    rows: int,
    row_size: int,
    heads: int,
    head_size: int,
    position_size: int,
    start: int,
    path: Array,
) -> None:
    """Move the contents of positions ``start + path`` (increasing) of a ``TensorLayout`` to ``start`` and onwards."""
    words = position_size // WORD_SIZE
    for row in range(rows):
        for head in range(heads):
            first = address + row * row_size + head * head_size + start * position_size
            for index in range(len(path)):
                source = array_at(first + path[index] * position_size, (words,), types.int16)
                target = array_at(first + index * position_size, (words,), types.int16)
                for word in range(words):
                    target[word] = source[word]


def compile_moves() -> None:
    """Compile ``move_on_host``, or load it from numba's cache, ahead of the first step."""
    move_on_host(*TensorLayout(0, 0, 0, 0, 0, 0), 0, np.empty(0, np.int64))


def select_rows(tensor: torch.Tensor, rows: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Return a copy of the given rows along ``dim``, without copying indices to the device or waiting for it."""
    starts = [place for place, row in enumerate(rows) if place == 0 or row != rows[place - 1] + 1]
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return torch.cat(
        [tensor.narrow(dim, rows[start], length) for start, length in zip(starts, lengths, strict=True)], dim
    )


@torch.inference_mode()
def move_ranges(tensor: torch.Tensor, start: int, path: Sequence[int]) -> None:
    """Move the contents of positions ``start + path`` to ``start`` and onwards, without waiting for the device."""
    moved = select_rows(tensor, [start + offset for offset in path], 3)
    tensor.narrow(3, start, len(path)).copy_(moved)


@torch.inference_mode()
def move_on_device(tensors: Sequence[torch.Tensor], moved_to: torch.Tensor, moved_from: torch.Tensor) -> None:
    """Move the contents of each slot's positions ``moved_from [slots, moves]`` to ``moved_to [slots]`` and onwards."""
    slots, moves = moved_from.shape
    targets = moved_to[:, None] + torch.arange(moves, device=moved_to.device)
    for tensor in tensors:
        for slot in range(slots):
            of_slot = tensor[:, slot]
            of_slot.index_copy_(2, targets[slot], of_slot.index_select(2, moved_from[slot]))
