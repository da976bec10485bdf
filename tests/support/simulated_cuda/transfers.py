"""Copies between host and device, and copies on the device that use the same operations."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tests.support.simulated_cuda.counts import COPY_IN, COPY_OUT, KERNEL, STAGED
from tests.support.simulated_cuda.queue import DEVICE, Allocation, Operation
from tests.support.simulated_cuda.tensors import PINNED, DeviceTensor, new_tensor

aten = torch.ops.aten


def is_transfer(source: torch.Tensor, *, device: torch.device | None = None, **options: Any) -> bool:
    """Return True if a copy goes from the host to the device or back."""
    return device is not None and (device.type == "cuda") != isinstance(source, DeviceTensor)


def copied_to(
    source: torch.Tensor, *, device: torch.device, non_blocking: bool = False, pin_memory: bool = False, **options: Any
) -> torch.Tensor:
    """Return a copy in new memory on the other side, with the requested dtype and layout."""
    if isinstance(source, DeviceTensor):
        DEVICE.wait("copies from the device to pageable memory")
        copied: torch.Tensor = aten._to_copy.default(source.numbers.clone(), **options)
        return copied
    made = new_tensor(torch.empty_like(source, dtype=options.get("dtype"), pin_memory=False))
    send(made.numbers, source, made.allocation, non_blocking=non_blocking)
    return made


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy into existing memory on the host or the device, from either of them."""
    if isinstance(target, DeviceTensor):
        if isinstance(source, DeviceTensor):
            uses = [weakref.ref(target.allocation), weakref.ref(source.allocation)]
            numbers = target.numbers, source.numbers
            DEVICE.launch(Operation(KERNEL, "aten::copy_", aten.copy_.default, numbers, uses=uses))
        else:
            send(target.numbers, source, target.allocation, non_blocking=non_blocking)
        return target
    assert isinstance(source, DeviceTensor)
    is_pinned, uses = PINNED.has(target), [weakref.ref(source.allocation)]
    is_block = target.is_contiguous() and source.is_contiguous()
    if not (is_pinned and non_blocking and is_block):
        DEVICE.wait(f"copies {'' if is_block else 'parts '}from the device{'' if is_pinned else ' to pageable memory'}")
        with DEVICE.working():
            return target.copy_(source.numbers)
    # The device writes the copy when it reaches it in its queue.
    DEVICE.launch(Operation(COPY_OUT, "copy out", aten.copy_.default, (target, source.numbers), uses=uses))
    return target


def send(numbers: torch.Tensor, source: torch.Tensor, allocation: Allocation, *, non_blocking: bool) -> None:
    """Copy from the host to device memory."""
    if not source.numel():
        return
    uses = [weakref.ref(allocation)]
    # torch first copies parts of a tensor to a contiguous block in pageable memory.
    is_pinned = PINNED.has(source) and source.is_contiguous() and numbers.is_contiguous()
    if is_pinned and non_blocking:  # the device reads the source when it reaches the copy in its queue
        DEVICE.launch(Operation(COPY_IN, "copy in", aten.copy_.default, (numbers, source), uses=uses))
        return
    if DEVICE.capture:
        raise DEVICE.counts.fault("cannot copy from memory that is not pinned during a capture")
    staged = source.detach().clone()
    DEVICE.launch(Operation(STAGED, "copy in", aten.copy_.default, (numbers, staged), uses=uses))
    if not non_blocking:
        DEVICE.wait(f"copies to the device{'' if is_pinned else ' from pageable memory'}")
