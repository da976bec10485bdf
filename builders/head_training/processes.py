"""Data-parallel training by one process, or by the processes of ``accelerate launch``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Processes:
    """The single training process, or the group of processes that ``accelerate launch`` started."""

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.size: int = accelerator.num_processes if accelerator else 1

    def prepare(self, module: torch.nn.Module) -> Any:
        """Wrap a module for data-parallel training, with gradients averaged over the processes."""
        return self._accelerator.prepare_model(module) if self._accelerator else module

    def without_sync(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which the module's gradients accumulate without being synchronized."""
        return self._accelerator.no_sync(module) if self._accelerator else nullcontext()

    def reduce_sum(self, values: torch.Tensor) -> Any:
        return self._accelerator.reduce(values, reduction="sum") if self._accelerator else values

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()


def world_size() -> int:
    """Return the number of processes that a launcher started, including this process; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_group(*, on_cpu: bool) -> Processes:
    """Return the process group that a launcher started or, without a launcher, this process alone."""
    if world_size() == 1:
        return Processes()
    from accelerate import Accelerator

    return Processes(Accelerator(cpu=on_cpu))
