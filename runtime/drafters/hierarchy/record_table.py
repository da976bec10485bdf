"""The records of a drafter's sources, which compiled code finds by an array of their addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.compiled_source import (
    ADDRESSES,
    MAX_SOURCE_ROWS,
    NEAR_AT,
    SOURCE_ROW,
    TABLE_AT,
    WEIGHTS_AT,
    WORK_AT,
    WORKSPACE,
    CompiledSource,
)
from hdtool.runtime.drafters.hierarchy.matching_sources import PREDICTION_SOURCE
from hdtool.runtime.drafters.hierarchy.token_probabilities import new_weights, rows_of_weights
from hdtool.runtime.kernels.compiled import Array, Uncopyable


class RecordTable(Uncopyable):
    """The workspace, the learned weights, the table of sources and the record of each source."""

    def __init__(self, offered: dict[CompiledSource, tuple[Any, Array]], near: Array) -> None:
        """``offered`` maps sources to whether they are used, and to their records; ``near`` goes to ``NEAR_AT``."""
        self.work, self._table = np.zeros(1, WORKSPACE), np.zeros(MAX_SOURCE_ROWS, SOURCE_ROW)
        self.weights = new_weights([*offered])
        self.rows_of = rows_of_weights([*offered])
        """Rows of learned weights by source."""
        self._rows = [
            (source, source.row(self.rows_of[source.name].start)) for source, (used, _) in offered.items() if used
        ]
        self._records: dict[int, Array] = {source.name: record for source, (_, record) in reversed(offered.items())}
        self._records |= {WORK_AT: self.work, WEIGHTS_AT: self.weights, NEAR_AT: near, TABLE_AT: self._table}
        assert all(record.flags.aligned for record in self._records.values())
        self._addresses = np.zeros(ADDRESSES, np.int64)
        for number, record in self._records.items():
            self._addresses[number] = record.ctypes.data
        self.address = self._addresses.ctypes.data
        """Address of the array of addresses."""

    def use(self, *, prediction: bool) -> None:
        """Fill the table of sources, with or without the prediction source."""
        rows = [row for source, row in self._rows if prediction or source is not PREDICTION_SOURCE]
        self._table[: len(rows)] = rows
        self.work["rows"] = len(rows)
