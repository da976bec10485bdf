"""Launch Triton kernels on the simulated device, where Triton's interpreter computes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from tests.support.simulated_cuda.counts import KERNEL
from tests.support.simulated_cuda.dispatch import current_values, mapped
from tests.support.simulated_cuda.queue import DEVICE, Operation
from tests.support.simulated_cuda.tensors import DeviceTensor


class DeviceKernels:
    """Stands for a module of Triton kernels, whose launches it queues or captures."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> DeviceKernel:
        return DeviceKernel(name, getattr(self._module, name))


class DeviceKernel:
    def __init__(self, name: str, kernel: Any) -> None:
        self._name, self._kernel = name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, self._kernel[grid])

    def _launch(self, run: Callable[..., Any], *arguments: Any, **constants: Any) -> None:
        uses = [weakref.ref(each.allocation) for each in arguments if isinstance(each, DeviceTensor)]
        given = mapped(arguments, current_values)
        DEVICE.launch(Operation(KERNEL, self._name, run, given, constants, uses=uses))
