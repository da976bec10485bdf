"""Run Triton kernels on a CPU with Triton's interpreter, which tests/conftest.py enables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Run the kernels of CUDA passes on a CPU inside this block, whatever the device."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        from hdtool.runtime.engines.captured import captured_passes, fused_pass
        from hdtool.runtime.engines.cuda.triton_operations import TritonOperations

        def everywhere(device: torch.device) -> TritonOperations:
            made = TritonOperations(device)
            made._processors = 8  # splits the keys into several parts
            return made

        for module in (fused_pass, captured_passes):
            patch.setattr(module, "triton_operations", everywhere)
        yield
