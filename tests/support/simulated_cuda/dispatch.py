"""Dispatch torch operations on tensors of the simulated device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.simulated_cuda import transfers
from tests.support.simulated_cuda.counts import KERNEL, DeviceError
from tests.support.simulated_cuda.queue import CPU, CUDA, DEVICE, Operation
from tests.support.simulated_cuda.tensors import PINNED, DeviceTensor, new_tensor, spoil

aten = torch.ops.aten

SINGLE_KERNELS = {aten.scaled_dot_product_attention.default, aten.linear.default, aten.rms_norm.default}
"""Operations that torch composes of others and CUDA computes in one kernel."""
VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
}
"""Operations that return views without saying so in their schema."""
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Operations that return a number to the host."""
INDEXING = {
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
}
"""Operations that take indices from the host, which are sent to the device, or masks, whose sum determines a shape."""
TAKE_NO_NUMBER = {aten.gather.default, aten.index_select.default}
"""Operations that reject a zero-dimensional tensor of the host, which others accept as a number."""
META = torch.device("meta")
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
MASKS = torch.bool, torch.uint8


def histc_of_integers(numbers: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return aten.histc.default(numbers.float(), *args, **options).to(numbers.dtype)  # type: ignore[no-any-return]


STAND_INS = {aten.histc.default: histc_of_integers}
"""Replacements of kernels whose dtypes CUDA supports and the CPU does not."""


def shape_of_grouped_matmul(rows: torch.Tensor, weights: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Return an empty result of a grouped matmul, in which each group of rows is multiplied by its own matrix."""
    return rows.new_empty((rows.shape[0], weights.shape[2]))


SHAPES = {aten._grouped_mm.default: shape_of_grouped_matmul}
"""Shape functions for dtypes that CUDA supports and the meta device rejects."""


class Dispatcher(TorchDispatchMode):
    """Dispatch mode that sees all operations, including those that create device tensors without taking any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # a tensor subclass with parts, whose own code calls operations on the parts
        return dispatch(func, args, kwargs or {})


DISPATCHER = Dispatcher()  # type: ignore[no-untyped-call]


def has_own_dispatch(kind: type) -> bool:
    """Return True if a tensor class dispatches its operations itself, as those of quantization libraries do."""
    usual = torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl
    return not issubclass(kind, DeviceTensor) and kind.__torch_dispatch__ not in usual  # type: ignore[attr-defined]


def dispatch(func: Any, args: Any, options: dict[str, Any]) -> Any:
    if DEVICE.is_working:
        return func(*args, **options)
    if func is torch.ops.prim.device.default:
        return CUDA
    leaves = [*leaves_of(args), *leaves_of(options.values())]
    is_device = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
    if not is_device and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
        return on_host(func, args, options)
    if func not in SINGLE_KERNELS and is_composed(func):
        with DISPATCHER:
            found = func.decompose(*args, **options)
        if found is not NotImplemented:
            return found
    if func in READS:
        DEVICE.wait("reads a number")
        with DEVICE.working():
            return func(*mapped(args, values_of))
    if func is aten._to_copy.default and transfers.is_transfer(*args, **options):
        return transfers.copied_to(*args, **options)
    if func is aten.copy_.default:
        return transfers.copy(*args, **options)
    if not is_device:
        return made(func, args, options)
    if (device := options.pop("device", None)) is not None and device.type == "cpu":
        options["device"] = CPU
        return on_host(func, mapped(args, lambda like: torch.empty_like(values_of(like))), options)
    take_to_device(func, leaves)
    return computed(func, args, options)


@cache
def is_composed(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.numbers if isinstance(tensor, DeviceTensor) else tensor


def current_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a kernel reads: the device's memory, or a copy of a host tensor as it is now."""
    return tensor.numbers if isinstance(tensor, DeviceTensor) else tensor.detach().clone()


def leaves_of(values: Any) -> Iterator[Any]:
    """Yield all items of nested sequences."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from leaves_of(value)
        else:
            yield value


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``change`` to all tensors in a nested value. torch's pytrees would take most of a dispatch's time."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(part, change) for part in value])
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    return value


def on_host(func: Any, args: Any, options: dict[str, Any]) -> Any:
    if not options.get("pin_memory"):
        return func(*args, **options)
    found = func(*args, **{**options, "pin_memory": False})
    PINNED.add(found)
    return found


def made(func: Any, args: Any, options: dict[str, Any]) -> DeviceTensor:
    """Create a tensor on the device: zeros, ones, a range, or uninitialized memory."""
    options = {**options, "device": CPU}
    numbers = func(*args, **options)
    if func in EMPTY:
        spoil(numbers)
    else:
        DEVICE.launch(Operation(KERNEL, func.name(), func, args, options, [numbers]))
    return new_tensor(numbers)


def take_to_device(func: Any, leaves: list[Any]) -> None:
    """Check host tensors that are passed together with device tensors, as CUDA does."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor):
            if func in INDEXING and not leaf.is_floating_point():
                DEVICE.wait("sends indices of the host")
            elif leaf.dim() or func in TAKE_NO_NUMBER:
                raise DEVICE.counts.fault(f"expected all tensors on cuda:0, but one of {func.name()} is on the CPU")


def computed(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Return the result of a kernel, or of a view, which needs no kernel."""
    leaves = [*leaves_of(args), *leaves_of(options.values())]
    there = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    given, kept = mapped(args, current_values), mapped(options, current_values)
    if func.is_view or func in VIEWS:
        with torch.inference_mode(there[0].is_inference()):
            return mapped(func(*given, **kept), lambda view: DeviceTensor(view, there[0].allocation))
    uses = [weakref.ref(tensor.allocation) for tensor in there]
    kernel = STAND_INS.get(func, func)
    if func._schema.is_mutable:
        written = written_by(func, args, options)
        if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in written):
            raise DeviceError(f"{func.name()} writes to an inference tensor outside of inference mode")
        DEVICE.launch(Operation(KERNEL, func.name(), kernel, given, kept, uses=uses))
        if has_unknown_shape(func, leaves):
            DEVICE.wait("needs to know a shape")
        return written[0] if len(written) == 1 else tuple(written)
    if has_unknown_shape(func, leaves):
        DEVICE.wait("needs to know a shape")
        DEVICE.counts.add(KERNEL)
        with DEVICE.working():
            return mapped(kernel(*given, **kept), new_tensor)
    results = RESULTS.of(func, given, kept)
    if func not in EMPTY:
        DEVICE.launch(Operation(KERNEL, func.name(), kernel, given, kept, list(leaves_of([results])), uses))
    return mapped(results, new_tensor)


def written_by(func: Any, args: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes to and returns."""
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | options
    return [
        by_name[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def has_unknown_shape(func: Any, leaves: list[Any]) -> bool:
    """Return True if the result's shape or the number of kernels depends on values on the device."""
    if func in INDEXING:
        return any(isinstance(leaf, torch.Tensor) and leaf.dtype in MASKS for leaf in leaves[1:])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


class Results:
    """Allocator for the results of operations. The meta device computes their shapes, which are cached."""

    def __init__(self) -> None:
        self._shapes: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        key = func, *map(key_of, args), *((name, key_of(value)) for name, value in options.items())
        if key not in self._shapes:
            self._shapes[key] = shapes_of(func, args, options)
        return mapped(self._shapes[key], uninitialized)


RESULTS = Results()


def key_of(value: Any) -> Any:
    """Return the properties of an argument that determine the result's shape."""
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return type(value), value


def shapes_of(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Return the results of an operation as meta tensors."""
    return SHAPES.get(func, func)(*mapped(args, on_meta), **mapped(options, on_meta))


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def uninitialized(like: torch.Tensor) -> torch.Tensor:
    memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    spoil(memory)
    return memory
