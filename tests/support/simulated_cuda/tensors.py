"""Tensors of the device, their memory, and pinned memory of the host."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tests.support.simulated_cuda.queue import CUDA, DEVICE, Allocation

UNINITIALIZED = {torch.bool: True, torch.uint8: 77, torch.int8: 77, torch.int16: 77}
"""What new memory of integers holds; of others, a number that is an index of nothing."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device. Its ``numbers`` are right once queued work is done."""

    numbers: torch.Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, allocation: Allocation) -> DeviceTensor:
        self: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=CUDA,
        )
        self.numbers, self.allocation = numbers, allocation
        return self

    def __init__(self, numbers: torch.Tensor, allocation: Allocation) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The mode comes first; here arrives what other threads call, which do not have it.
        from tests.support.simulated_cuda.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        assert isinstance(new, DeviceTensor)
        usual_data.__set__(self, new)
        self.numbers, self.allocation = new.numbers, new.allocation

    def untyped_storage(self) -> Any:
        return self.allocation

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


DeviceTensor.__module__ = "torch.simulated_cuda"
"""Of torch, as far as hdtool can tell, and not of a library that keeps weights in its own way."""


def new_tensor(numbers: torch.Tensor) -> DeviceTensor:
    """A tensor in newly allocated memory, in the pool of the graph if one is recorded."""
    allocation = Allocation(numbers.untyped_storage().nbytes())
    if DEVICE.capture:
        DEVICE.capture.own(numbers, allocation)
    return DeviceTensor(numbers, allocation)


def spoil(memory: torch.Tensor) -> None:
    """Write what nobody may read."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    else:
        memory.fill_(UNINITIALIZED.get(memory.dtype, 2**30))


def data_ptr(tensor: torch.Tensor) -> int:
    """The address of a tensor's first number; compiled code of the host cannot read that of a device tensor."""
    if isinstance(tensor, DeviceTensor):
        return tensor.allocation.address + int(tensor.storage_offset()) * tensor.itemsize
    return usual_data_ptr(tensor)


usual_data_ptr = torch.Tensor.data_ptr
usual_data: Any = torch.Tensor.data


class PinnedMemory:
    """The pinned tensors of the host. They are kept, so that no other memory gets their addresses."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors[tensor.untyped_storage().data_ptr()] = tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._tensors


PINNED = PinnedMemory()
