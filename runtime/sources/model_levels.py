"""What the model store knows at a node of a growing tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.model_store import DISTINCT, START, STOP, TOTAL, ModelStore, find

ROWS_READ = 64

Ints = npt.NDArray[Any]


class ModelArrays(NamedTuple):
    """The arrays of a model store that look-ups read."""

    slots: Ints
    keys: Ints
    rows: Ints


def arrays_of(store: ModelStore | None) -> ModelArrays:
    """Those of a store; without one, arrays in which nothing is found."""
    if store is None:
        return ModelArrays(np.empty(0, np.int32), np.empty((0, 6), np.int32), np.empty((0, 2), np.int32))
    return ModelArrays(store.slots, store.keys, store.rows)


@njit(cache=True, nogil=True)
def known_as(model: ModelArrays, mark: np.uint64) -> tuple[int, int, int, int]:
    """Of a prefix with this hash: its first row and the one behind its last, the total and how many tokens follow.

    The total is 0 if nothing is known.
    """
    key = find(model.slots, model.keys, mark)
    if key < 0:
        return 0, 0, 0, 0
    start, stop = np.int64(model.keys[key, START]), np.int64(model.keys[key, STOP])
    total, distinct = np.int64(model.keys[key, TOTAL]), np.int64(model.keys[key, DISTINCT])
    # A damaged file must not lead out of the arrays.
    if not 0 <= start <= stop <= len(model.rows) or total <= 0:
        return 0, 0, 0, 0
    return start, min(stop, start + ROWS_READ), total, distinct
