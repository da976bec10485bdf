"""From which state each row of a tree starts, and in which of few buffers the state after it is made.

A row takes over the buffer of its parent if no later row starts from it. So a sequence has one buffer, and a tree at
most one for each two rows.
"""

from __future__ import annotations

from numba import types

from hdtool.runtime.engines.cpu.layer_record import Numbers
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.raw_memory import WORD_SIZE, array_at

PARENT, SOURCE, TARGET, LAST_CHILD, FREE = range(5)
"""The row before, ``BEFORE`` or ``PADDING``; the buffer that a row starts from, or ``BEFORE``, and that of the state
after it; the last row that starts from it; and a stack of buffers that are free."""
ORIGIN_FIELDS = FREE + 1
BEFORE, PADDING = -1, -2
"""A row starts from the state before the tree; a row is nobody's, and is not computed."""


@compiled
def origins_at(address: int, slot: int, rows: int) -> Numbers:
    """The table of the rows of one sequence."""
    return array_at(address + slot * rows * ORIGIN_FIELDS * WORD_SIZE, (rows, ORIGIN_FIELDS), types.int64)


@compiled
def buffers_of(rows: int) -> int:
    """Buffers that suffice for any tree of so many rows: each one but the last is of a row with a later child."""
    return rows // 2 + 1


@compiled
def fill_origins(origins: Numbers, parents: Ints) -> None:
    """Fill the table of a sequence from the parents of the nodes of its tree; further rows are padding."""
    rows, made, free = len(origins), 0, 0
    for row in range(rows):
        origins[row, LAST_CHILD] = BEFORE
        origins[row, PARENT] = BEFORE if row == 0 else PADDING if row > len(parents) else parents[row - 1] + 1
        if origins[row, PARENT] >= 0:
            origins[origins[row, PARENT], LAST_CHILD] = row
    for row in range(rows):
        parent = origins[row, PARENT]
        if parent == PADDING:
            continue
        origins[row, SOURCE] = origins[parent, TARGET] if parent >= 0 else BEFORE
        if parent >= 0 and origins[parent, LAST_CHILD] == row:
            target = origins[parent, TARGET]
        elif free:
            free -= 1
            target = origins[free, FREE]
        else:
            target = made
            made += 1
        origins[row, TARGET] = target
        if origins[row, LAST_CHILD] == BEFORE and row < rows - 1:
            origins[free, FREE] = target
            free += 1
