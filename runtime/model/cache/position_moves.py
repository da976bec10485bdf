"""Moves of positions within a KV cache in compiled code: an accepted path becomes contiguous."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import copy_numbers

WORD_SIZE = 4
"""Bytes that are moved at once."""


class Place(NamedTuple):
    """A tensor ``[rows, 1, heads, positions, width]`` of one sequence as compiled code reads it; sizes are bytes."""

    address: int
    rows: int
    row_size: int
    heads: int
    head_size: int
    position_size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return cls(tensor.data_ptr(), tensor.shape[0], strides[0], tensor.shape[2], strides[2], strides[3])


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether compiled code moves the positions of a tensor, as words of memory."""
    is_whole = tensor.is_cpu and tensor.shape[1] == 1 and tensor.stride()[3:] == (tensor.shape[4], 1)
    return is_whole and tensor.shape[4] * tensor.itemsize % WORD_SIZE == 0


@compiled
def move_positions(
    address: int,
    rows: int,
    row_size: int,
    heads: int,
    head_size: int,
    position_size: int,
    start: int,
    path: Array,
) -> None:
    """Move the positions ``start + path`` of all rows and heads to ``start`` and after."""
    words = position_size // WORD_SIZE
    for row in range(rows):
        for head in range(heads):
            first = address + row * row_size + head * head_size + start * position_size
            for place in range(len(path)):
                copy_numbers(first + path[place] * position_size, words, first + place * position_size)


def compile_moves() -> None:
    """Compile them, or load them from the cache, before the first step."""
    move_positions(*Place(0, 0, 0, 0, 0, 0), 0, np.empty(0, np.int64))
