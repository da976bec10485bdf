"""What the target would have said after the drafts that it turned down."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.tree import ROOT

Ints = npt.NDArray[Any]


def discarded(tail: Ints, tokens: Ints, parents: Ints, path: list[int], said: Ints) -> Ints:
    """A row for each node off the path: the tokens that lead to it, as many as ``tail`` has, and the answer to them.

    ``tail`` ends with the root of the tree; ``said`` has the target's answer to each node and may be
    shorter than the tree. The forward pass has computed these answers whether or not they are read.
    """
    return _discarded(tail, tokens, parents, np.array(path, np.int64), said)


@njit(cache=True, nogil=True)
def _discarded(tail: Ints, tokens: Ints, parents: Ints, path: Ints, said: Ints) -> Ints:
    length = len(tail)
    turned_down = np.ones(len(tokens), np.bool_)
    turned_down[path] = False
    rows = np.empty((len(said), length + 1), np.int32)
    count = 0
    for end in range(len(said)):
        if turned_down[end]:
            rows[count, length] = said[end]
            node, level = end, length - 1
            while node != ROOT and level >= 0:
                rows[count, level] = tokens[node]
                node = parents[node]
                level -= 1
            # What is left to fill is the end of the context, the root last.
            for above in range(level + 1):
                rows[count, above] = tail[length - 1 - level + above]
            count += 1
    return rows[:count]
