"""Captured steps without a GPU."""

from __future__ import annotations

import torch

from hdtool.runtime.model.cuda_graphs import Run


class Direct:
    """Calls the function itself: the same shapes and tensors on any device."""

    def record(self, run: Run) -> Run:
        return run

    def reset(self) -> None:
        pass


def direct(device: torch.device) -> Direct:
    return Direct()


class Rehearsed(Direct):
    """Runs while it records, as graphs are recorded, and counts what it has recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Run) -> Run:
        self.recorded += 1
        for _ in range(3):
            run()
        return run
