"""Names devices, library versions and dtypes, to report with measurements."""

from __future__ import annotations

import os
import platform

import torch
import transformers

from hdtool.runtime.kernels.compiled import processor_name


def machine(device: torch.device | None = None) -> str:
    """Return a line with a device and library versions; ``device`` defaults to the GPU, if any, else the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    host = "" if device.type == "cuda" else f", {os.cpu_count()} cores, {platform.system()}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device_name(device)}{host}, {versions}"


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for any other device, the name of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
