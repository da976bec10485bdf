"""Training in one process, or in several through ``accelerate``, one per GPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hdtool.data.errors import HeadsError


class Processes:
    """This process alone, or those that ``accelerate launch`` started."""

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.size: int = accelerator.num_processes if accelerator else 1

    def shared(self, module: torch.nn.Module) -> Any:
        """The module wrapped for all processes; gradients are the mean over them."""
        return self._accelerator.prepare_model(module) if self._accelerator else module

    def without_sync(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients in this block without exchanging them."""
        return self._accelerator.no_sync(module) if self._accelerator else nullcontext()

    def total(self, numbers: torch.Tensor) -> Any:
        return self._accelerator.reduce(numbers, reduction="sum") if self._accelerator else numbers

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()


def world_size() -> int:
    """The number of processes that a launcher started, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_group(*, on_cpu: bool) -> Processes:
    """The processes that a launcher started, or this one alone."""
    if world_size() == 1:
        return Processes()
    try:
        from accelerate import Accelerator
    except ImportError:
        raise HeadsError(
            "several processes were started, which needs accelerate: pip install accelerate, or start one process"
        ) from None
    return Processes(Accelerator(cpu=on_cpu))
