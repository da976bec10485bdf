"""Keeps the keys with the highest scores of a best-first search in a sorted list."""

from __future__ import annotations

from typing import Any

from hdtool.runtime.kernels.compiled import Array, Ints, compiled


@compiled
def insert_best(scores: Array, keys: Ints, score: Any, key: Any, first: int, size: int, max_size: int) -> int:
    """Insert a key by descending score, after those of equal scores; return the new size of the list.

    The first ``first`` keys keep their places. A full list drops its last key, or the new key if that scores no higher.
    """
    if size < max_size:
        size += 1
    elif score <= scores[size - 1]:
        return size
    index = size - 1
    while index > first and scores[index - 1] < score:
        scores[index], keys[index] = scores[index - 1], keys[index - 1]
        index -= 1
    scores[index], keys[index] = score, key
    return size
