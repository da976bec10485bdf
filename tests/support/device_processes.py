"""Run scenarios of the simulated CUDA device in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.project import ROOT

needs_no_cuda = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None,
    reason="a device is simulated on Linux, in a build of torch without CUDA",
)
TIMEOUT_SECONDS = 900
"""Timeout of a process in seconds."""


@cache
def scenarios(home: Path, *arguments: str, module: str = "device_scenarios") -> dict[str, Any]:
    """Run groups of scenarios in a new process, and return what it printed. The result is cached for all tests."""
    environment = {**os.environ, "HDTOOL_HOME": str(home), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert not process.returncode, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found
