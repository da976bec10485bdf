"""Checks of the machine: Python, processor, memory, devices and threads."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator

import torch

from hdtool.builders.diagnosis.finding import MEND, NOTE, Finding
from hdtool.data.stores.home import home
from hdtool.runtime.kernels.cpu_name import processor_name

DRIVERS = ("nvidia-smi", "rocm-smi")
"""Programs that come with the driver of a GPU."""
TORCH_PAGE = "https://pytorch.org/get-started/locally"


def machine_findings() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} in {sys.prefix}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}")
    if available := available_memory():
        yield Finding("memory", f"{available / 1e9:.1f} GB available")
    yield from _devices()
    yield _threads()


def available_memory() -> int | None:
    """Bytes of memory that are free or can be freed; None where the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            rows = dict(line.split(":", 1) for line in stream)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _devices() -> Iterator[Finding]:
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding(f"cuda:{number}", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    if torch.cuda.is_available():
        return
    if torch.backends.mps.is_available():
        yield Finding("mps", "the GPU of this Mac")
    elif driver := next(filter(shutil.which, DRIVERS), None):
        yield Finding(
            "GPU",
            f"{driver} is here, and torch {torch.__version__} sees no GPU",
            MEND,
            f"install the torch for your driver: {TORCH_PAGE}",
        )
    else:
        yield Finding("GPU", "none: models run on the processor")


def _threads() -> Finding:
    measured = sum(1 for _ in (home() / "costs").glob("*/*.json"))
    found = f"{torch.get_num_threads()} at most; measured here: {measured} models"
    if not measured:
        return Finding(
            "threads", found, NOTE, "hdtool bench-cost --model MODEL measures a model once, on an idle machine"
        )
    return Finding("threads", found)
