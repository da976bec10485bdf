"""On what a figure was measured, in words that a reader can place."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {versions()}"
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, {versions()}"


def versions() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
        return f"{found['model name'].strip()} (family {found['cpu family']}, model {found['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()
