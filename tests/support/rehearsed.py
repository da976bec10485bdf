"""Captured steps without a GPU."""

from __future__ import annotations

from hdtool.runtime.model.cuda_graphs import Direct, Run


class Rehearsed(Direct):
    """Runs while it records, as graphs are recorded, and counts what it has recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Run) -> Run:
        self.recorded += 1
        for _ in range(3):
            run()
        return run
