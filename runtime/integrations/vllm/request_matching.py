"""Matches the rows of a batch with their context tables by comparing tokens.

vLLM passes no request ids, and moves, removes and adds requests between rows. A context table belongs to a row only if
all of its tokens are a prefix of the row's context, so no request is drafted from the tokens of another one.
"""

from __future__ import annotations

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.stores.context_table import TABLE, clear, holds

NO_TABLE = -1


@compiled
def match_rows(tables: Ints, rows_of: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints) -> int:
    """Choose a table for each of the ``wanted`` rows of ``contexts``; return how many rows were matched.

    ``rows_of`` is the last row of each table and is updated. A table is free if its tokens are not a prefix of any row:
    a new row takes one and clears it. If no table is free, the row gets none.
    """
    last = np.full(len(contexts), NO_TABLE, np.int64)
    free = np.ones(len(tables), np.bool_)
    for table in range(len(tables)):
        if rows_of[table] >= 0:
            last[rows_of[table]] = table
    matched = 0
    for turn in range(len(wanted)):
        row = wanted[turn]
        table, chosen[turn] = last[row], NO_TABLE
        if table >= 0 and _is_prefix(tables[table], contexts[row], lengths[row]):
            chosen[turn], free[table] = table, False
            matched += 1
    if matched < len(wanted):
        matched += _match_moved(tables, contexts, lengths, wanted, chosen, free)
    rows_of[:] = NO_TABLE
    for turn in range(len(wanted)):
        if chosen[turn] >= 0:
            rows_of[chosen[turn]] = wanted[turn]
    return matched


@compiled
def _match_moved(tables: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints, free: Ints) -> int:
    """Match moved rows with their tables, then give free tables to new rows; return how many were matched."""
    matched = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NO_TABLE:
            row, longest = wanted[turn], np.int64(0)
            for table in range(len(tables)):
                size = array_at(tables[table], 1, TABLE)[0].end
                if free[table] and size > longest and _is_prefix(tables[table], contexts[row], lengths[row]):
                    chosen[turn], longest = table, size
            if longest > 0:
                free[chosen[turn]] = False
                matched += 1
    table = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NO_TABLE:
            while table < len(free) and not free[table]:
                table += 1
            if table == len(free):
                break
            chosen[turn], free[table] = table, False
            clear(array_at(tables[table], 1, TABLE)[0])
    return matched


@compiled
def _is_prefix(address: int, context: Ints, length: int) -> bool:
    """Whether a table holds a prefix of a context; its last token is compared first, as it usually differs."""
    table = array_at(address, 1, TABLE)[0]
    size = table.end
    if size == 0 or size > length or table.ring[(size - 1) & (len(table.ring) - 1)] != context[size - 1]:
        return False
    return holds(table, context[:length])
