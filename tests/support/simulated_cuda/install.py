"""Install the simulated device in place of CUDA."""

from __future__ import annotations

import copy
import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.support.simulated_cuda.dispatch import DISPATCHER
from tests.support.simulated_cuda.graphs import STREAMS, CUDAGraph, Event, GraphCapture, Pool, Stream
from tests.support.simulated_cuda.queue import CUDA, DEVICE, Device
from tests.support.simulated_cuda.tensors import Patches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "Simulated CUDA"
CAPABILITY = 9, 0
MEMORY = 80 << 30
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY,
    multi_processor_count=132,
    warp_size=32,
    gcnArchName="",
)
DOUBLES: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "current_stream": STREAMS.current,
    "default_stream": lambda device=None: STREAMS.default,
    "device": lambda device: nullcontext(),
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": lambda device=None: PROPERTIES,
    "graph": GraphCapture,
    "graph_pool_handle": Pool,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: DEVICE.capture is not None,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "set_device": lambda device: None,
    "set_stream": STREAMS.set,
    "stream": STREAMS.using,
    "synchronize": lambda device=None: DEVICE.wait("the device"),
}
"""Replacements of functions and classes of ``torch.cuda``."""

CUDA_TYPE, META_TYPE = 1, 14
"""Indices in the registry of device guards, from c10/core/DeviceType.h."""


def install() -> Device:
    """Make torch use the simulated device as ``cuda:0`` until the process ends. Only the calling thread may use it."""
    if torch.cuda.is_available() and torch.cuda.get_device_name() == NAME:
        return DEVICE
    lend_device_guard()
    for name, double in DOUBLES.items():
        setattr(torch.cuda, name, double)
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.accelerator.synchronize = DOUBLES["synchronize"]
    Patches().install()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") creates it on the host and copies it
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    DISPATCHER.__enter__()  # type: ignore[no-untyped-call]
    return DEVICE


def lend_device_guard() -> None:
    """Use the meta device's guard, which does nothing, for CUDA. CPU builds of torch have none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (META_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[CUDA_TYPE] = registry[META_TYPE]


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a host model on the device."""
    moved: PreTrainedModel = copy.deepcopy(model).to(CUDA)  # type: ignore[arg-type]
    moved.tie_weights()  # because parameters were replaced, not overwritten
    return moved
