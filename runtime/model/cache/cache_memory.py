"""Memory of KV caches, which returns to the system with the cache."""

from __future__ import annotations

import mmap
from math import prod

import torch

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on a CPU, in pages of its own.

    Caches live longer than what is allocated beside them and differ in size. An allocator that mixes both keeps more
    and more memory that nobody uses.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, **PRIVATE), dtype=dtype).view(shape)
