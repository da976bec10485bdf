"""Triton's kernels on a CPU, by its interpreter, which tests/conftest.py chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """In this block the kernels of passes on CUDA run on a CPU, whatever the device."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        from hdtool.runtime.engines.cuda import fused_pass
        from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
        from hdtool.runtime.model import captured_passes

        def everywhere(device: torch.device) -> TritonOperations:
            made = TritonOperations(device)
            made._processors = 8  # several splits of the keys
            return made

        for module in (fused_pass, captured_passes):
            patch.setattr(module, "triton_operations", everywhere)
        yield
