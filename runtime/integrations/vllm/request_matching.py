"""Which request a row of a batch holds, recognised by its tokens.

An engine that gives no ids moves requests from row to row, takes them out and puts others in. A memory is a row's
own only if all that it holds is how the row begins, every token of it: so nothing is ever drafted from what another
request said, whatever the engine does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.drafters.hierarchy.sources.context_table import TABLE, clear, holds
from hdtool.runtime.kernels.raw_memory import array_at

NOBODY = -1

Ints = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def recognise(tables: Ints, held: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints) -> int:
    """Choose a memory for each of the ``wanted`` rows of ``contexts``, and say how many rows were known.

    ``held`` is the row that each memory was last of, and becomes the row that it is of now. A memory that no row goes
    on from is free: a row that is new takes one and empties it. Where there are none left, the row gets nobody's.
    """
    last = np.full(len(contexts), NOBODY, np.int64)
    free = np.ones(len(tables), np.bool_)
    for memory in range(len(tables)):
        if held[memory] >= 0:
            last[held[memory]] = memory
    known = 0
    for turn in range(len(wanted)):
        row = wanted[turn]
        memory, chosen[turn] = last[row], NOBODY
        if memory >= 0 and _goes_on(tables[memory], contexts[row], lengths[row]):
            chosen[turn], free[memory] = memory, False
            known += 1
    if known < len(wanted):
        known += _look_around(tables, contexts, lengths, wanted, chosen, free)
    held[:] = NOBODY
    for turn in range(len(wanted)):
        if chosen[turn] >= 0:
            held[chosen[turn]] = wanted[turn]
    return known


@njit(cache=True, nogil=True)
def _look_around(tables: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints, free: Ints) -> int:
    """Rows that moved find their memories, and then new ones take what is free; how many were found."""
    known = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NOBODY:
            row, longest = wanted[turn], np.int64(0)
            for memory in range(len(tables)):
                size = array_at(tables[memory], 1, TABLE)[0].end
                if free[memory] and size > longest and _goes_on(tables[memory], contexts[row], lengths[row]):
                    chosen[turn], longest = memory, size
            if longest > 0:
                free[chosen[turn]] = False
                known += 1
    memory = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NOBODY:
            while memory < len(free) and not free[memory]:
                memory += 1
            if memory == len(free):
                break
            chosen[turn], free[memory] = memory, False
            clear(array_at(tables[memory], 1, TABLE)[0])
    return known


@njit(cache=True, nogil=True)
def _goes_on(at: int, context: Ints, length: int) -> bool:
    """Whether a memory holds the beginning of a context; its end is looked at first, as strangers differ there."""
    table = array_at(at, 1, TABLE)[0]
    size = table.end
    if size == 0 or size > length or table.ring[(size - 1) & (len(table.ring) - 1)] != context[size - 1]:
        return False
    return holds(table, context[:length])
