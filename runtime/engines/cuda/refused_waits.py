"""Refuses operations that wait for the device, which a CUDA graph cannot record.

torch's sync debug mode does that too, but in all threads of the process, so that another thread's ``item`` would raise.
The modes used here see only the operations of their own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
MASKS = torch.bool, torch.uint8
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
"""Functions that make tensors from numbers on the host, and copy them to the device unseen by dispatch modes."""
BY_LISTS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class WaitError(RuntimeError):
    """Raised for an operation that waits for the device."""

    def __init__(self, operation: object) -> None:
        super().__init__(f"{operation} waits for the device")


@contextmanager
def waits_refused() -> Iterator[None]:
    """In this block, raise a ``WaitError`` for operations of this thread that wait for the device."""
    with _Functions(), _Operations():  # type: ignore[no-untyped-call]
        yield


class _Functions(TorchFunctionMode):
    """Refuses torch functions that copy Python numbers or lists from the host to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in BY_LISTS
            and args[0].is_cuda
            and any(isinstance(part, list | np.ndarray) for part in _parts(args[1]))
        ):
            raise WaitError(f"indexing with a list in {func.__name__}")
        found = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and found.is_cuda and not getattr(args[-1] if args else None, "is_cuda", False):
            raise WaitError(func.__name__)
        return found


class _Operations(TorchDispatchMode):
    """Refuses operations that read numbers or shapes from the device, and blocking copies between host and device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if _reads_device(func, args) or (func in COPIES and _copies_and_waits(func, args, options)):
            raise WaitError(func)
        return func(*args, **options)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _reads_device(func: Any, args: Any) -> bool:
    """Return True if an operation's result, its shape or its number of kernels depends on numbers on the device."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not any(tensor.is_cuda for tensor in tensors):
        return False
    if func in INDEXING:
        return any(index is not None and (index.dtype in MASKS or index.is_cpu) for index in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _copies_and_waits(func: Any, args: Any, options: dict[str, Any]) -> bool:
    """Return True for a copy between host and device that blocks: all but non-blocking ones with pinned memory."""
    if func is aten.copy_.default:
        to, source, *others = args
        if to.is_cuda == source.is_cuda:
            return False
        is_free = options.get("non_blocking") or (others and others[0])
        return not (is_free and (source if to.is_cuda else to).is_pinned())
    (source,) = args
    device = torch.device(options.get("device") or source.device)
    if (device.type == "cuda") == source.is_cuda:
        return False
    return not (device.type == "cuda" and options.get("non_blocking") and source.is_pinned())
