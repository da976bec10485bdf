"""The script of all checks that need a GPU: it says so where there is none, and its commands run on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.project import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "run.sh"

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="the script is one of bash")


def started(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    surroundings = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "HDTOOL_HOME": str(out / "home")}
    return subprocess.run([str(SCRIPT), *options], env=surroundings, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = started(tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: torch sees no CUDA device here: run this where there is one, or with --dry")
    assert not (tmp_path / "out").exists()
    assert started(tmp_path / "out", "--what").returncode == 2


@pytest.mark.long
def test_a_dry_run_goes_through_all_steps(tmp_path: Path) -> None:
    result = started(tmp_path, "--dry")
    assert result.returncode == 0, result.stderr
    assert "failed" not in result.stderr
    for name in ("verify-float32", "verify-bfloat16", "verify-heads", "cost", "cost-tiny", "tiny"):
        assert (tmp_path / f"{name}.txt").read_text().strip(), name
    assert json.loads((tmp_path / "cost-tiny" / "cost.json").read_text())["contexts"] == [32, 64]
    table = (tmp_path / "tiny.txt").read_text()
    assert [line.split()[0] for line in table.splitlines()[-4:]] == ["generate", "generate-static", "ar", "hd"]
