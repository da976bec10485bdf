"""Evidence of the model store at a node of a growing tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.raw_memory import array_at, prefetch
from hdtool.runtime.stores.model_store import KEY_WIDTH, ModelStore, entry_of, slot_of

MODEL = np.dtype(
    [
        ("slots", np.int64, 2),  # address and length, as of all arrays
        ("keys", np.int64, 2),
        ("rows", np.int64, 2),
        ("vocabulary", np.int64),
    ],
    align=True,
)

Array = npt.NDArray[Any]


def model_record(store: ModelStore | None) -> Array:
    """The addresses of the arrays of a store, which must outlive them; without a store, no entry is found."""
    record = np.zeros(1, MODEL)
    if store:
        for part in ("slots", "keys", "rows"):
            array = getattr(store, part)
            assert array.flags.c_contiguous and array.dtype == np.int32
            record[part] = array.ctypes.data, len(array)
        record["vocabulary"] = store.vocabulary
    return record


@njit(cache=True, nogil=True)
def rows_of(model: Any) -> Array:
    """Tokens and counts of all prefixes."""
    return array_at(model.rows[0], (model.rows[1], 2), np.int32)


@njit(cache=True, nogil=True)
def known_as(model: Any, prefix_hash: np.uint64) -> tuple[Any, Any, Any, Any]:
    """The entry of the prefix with this hash, as ``entry_of`` gives it."""
    slots = array_at(model.slots[0], model.slots[1], np.int32)
    keys = array_at(model.keys[0], (model.keys[1], KEY_WIDTH), np.int32)
    return entry_of(slots, keys, model.rows[1], prefix_hash)


@njit(cache=True, nogil=True)
def fetch(model: Any, hashes: Array, longest: int) -> None:
    """Prefetch the entries of prefixes up to a length, all at once and not one after the other."""
    slots = array_at(model.slots[0], model.slots[1], np.int32)
    keys = array_at(model.keys[0], model.keys[1] * KEY_WIDTH, np.int32)
    mask = len(slots) - 1
    for length in range(1, longest + 1):
        prefetch(slots, slot_of(hashes[length], mask))
    for length in range(1, longest + 1):
        key = np.int64(slots[slot_of(hashes[length], mask)])
        if 0 <= key < model.keys[1]:
            prefetch(keys, key * KEY_WIDTH)
