"""Training in one process, or in several through ``accelerate``, one per GPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hdtool.data.errors import HeadsError


class SingleProcess:
    """One process."""

    rank, size = 0, 1

    def shared(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module wrapped for all processes; gradients are the mean over them."""
        return module

    def without_sync(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients in this block without exchanging them."""
        return nullcontext()

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def wait(self) -> None:
        pass


class Distributed(SingleProcess):
    """The processes that ``accelerate launch`` started."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank, self.size = accelerator.process_index, accelerator.num_processes

    def shared(self, module: torch.nn.Module) -> torch.nn.Module:
        prepared: torch.nn.Module = self._accelerator.prepare_model(module)
        return prepared

    def without_sync(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        held: AbstractContextManager[Any] = self._accelerator.no_sync(module)
        return held

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self._accelerator.reduce(numbers, reduction="sum")
        return summed

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


def world_size() -> int:
    """The number of processes that a launcher started, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_group(*, on_cpu: bool) -> SingleProcess:
    """The processes that a launcher started, or this one alone."""
    if world_size() == 1:
        return SingleProcess()
    try:
        from accelerate import Accelerator
    except ImportError:
        raise HeadsError(
            "several processes were started, which needs accelerate: pip install accelerate, or start one process"
        ) from None
    return Distributed(Accelerator(cpu=on_cpu))
