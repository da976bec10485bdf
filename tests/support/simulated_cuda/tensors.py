"""Tensors of the simulated device, their memory, and pinned memory of the host."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch.nn import Parameter

from tests.support.simulated_cuda.queue import CUDA, DEVICE, Allocation, PartOfAllocation

UNINITIALIZED = {torch.bool: True, torch.uint8: 77, torch.int8: 77, torch.int16: 77}
"""Contents of uninitialized memory by dtype. Other integers hold 2**30, which is not a valid index."""


class DeviceTensorMeta(type(torch.Tensor)):  # type: ignore[misc]
    """Metaclass for which parameters on the device are device tensors, although their class is ``Parameter``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (type(instance) is Parameter and hasattr(instance, "numbers"))


class DeviceTensor(torch.Tensor, metaclass=DeviceTensorMeta):
    """Tensor on the device. Its ``numbers`` are correct once the queued work has run."""

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
    def __torch_dispatch__(cls, *args: Any) -> Any:
        return NotImplemented  # the dispatcher sees all operations first, and leaves some to other subclasses

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


DeviceTensor.__module__ = "torch.simulated_cuda"
"""Module of torch, because hdtool treats weights of other modules' classes as those of quantization libraries."""


def new_tensor(numbers: torch.Tensor) -> DeviceTensor:
    """Create a tensor in newly allocated memory, which belongs to the graph if one is being recorded."""
    allocation = Allocation(numbers.untyped_storage().nbytes())
    if DEVICE.capture:
        DEVICE.capture.keep_memory(numbers, allocation)
    return DeviceTensor(numbers, allocation)


def spoil(memory: torch.Tensor) -> None:
    """Overwrite memory with values that must not be read."""
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    else:
        memory.fill_(UNINITIALIZED.get(memory.dtype, 2**30))


PATCHED = "data_ptr", "new_tensor", "numpy", "tolist", "untyped_storage"
"""Tensor methods that bypass the dispatcher."""


class Patches:
    """Patches of tensor methods and attributes, which behave differently for device tensors, including parameters."""

    def __init__(self) -> None:
        self._data: Any = torch.Tensor.data
        self._usual = {name: getattr(torch.Tensor, name) for name in PATCHED}
        self._new_parameter: Any = Parameter.__new__
        self._usual_from_dlpack: Any = torch.from_dlpack  # type: ignore[attr-defined]

    def install(self) -> None:
        for name in self._usual:
            setattr(torch.Tensor, name, self._patched(name))
        torch.Tensor.data = property(self._get_data, self._set_data)  # type: ignore[assignment]
        Parameter.__new__ = staticmethod(self._make_parameter)  # type: ignore[method-assign, assignment]
        torch.from_dlpack = self._from_dlpack  # type: ignore[attr-defined, assignment]

    def _patched(self, name: str) -> Any:
        usual, own = self._usual[name], getattr(self, "_" + name)
        return lambda tensor, *args, **options: (own if isinstance(tensor, DeviceTensor) else usual)(
            tensor, *args, **options
        )

    @staticmethod
    def _data_ptr(tensor: DeviceTensor) -> int:
        """Return a unique address, which compiled host code cannot read."""
        return tensor.allocation.address + int(tensor.storage_offset()) * tensor.itemsize

    @staticmethod
    def _untyped_storage(tensor: DeviceTensor) -> Allocation:
        return tensor.allocation

    @staticmethod
    def _new_tensor(like: DeviceTensor, data: Any, *, dtype: Any = None, device: Any = CUDA) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or like.dtype, device=device)

    @staticmethod
    def _tolist(tensor: DeviceTensor) -> Any:
        return tensor.cpu().tolist()

    @staticmethod
    def _numpy(tensor: DeviceTensor, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def _get_data(self, tensor: torch.Tensor) -> Any:
        return tensor.detach() if isinstance(tensor, DeviceTensor) else self._data.__get__(tensor)

    def _set_data(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        self._data.__set__(tensor, new)
        if isinstance(tensor, DeviceTensor):
            assert isinstance(new, DeviceTensor)
            tensor.numbers, tensor.allocation = new.numbers, new.allocation

    def _from_dlpack(self, tensor: Any, **options: Any) -> torch.Tensor:
        if not isinstance(tensor, DeviceTensor):
            return cast(torch.Tensor, self._usual_from_dlpack(tensor, **options))
        numbers = self._usual_from_dlpack(tensor.numbers)
        return DeviceTensor(numbers, PartOfAllocation(tensor.allocation, tensor.data_ptr(), numbers.nbytes))

    def _make_parameter(self, kind: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        made = self._new_parameter(kind, data, requires_grad)
        if isinstance(made, DeviceTensor) and kind is Parameter:
            made.__class__ = Parameter  # type: ignore[assignment]
        return made


class PinnedMemory:
    """Registry of pinned host tensors. It keeps them alive, so that no other memory gets their addresses."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors[tensor.untyped_storage().data_ptr()] = tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._tensors


PINNED = PinnedMemory()
