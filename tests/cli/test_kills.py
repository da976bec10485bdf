"""Kills at random moments lose nothing; ``python -m tests.kills --times 1000`` does the same for longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted before forking")
def test_kills_lose_nothing(times: int) -> None:
    command = [sys.executable, "-m", "tests.kills", "--times", str(times), "--seed", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"^(\d+) runs, (\d+) of them killed before their end, 0 losses$", ended.stdout, re.MULTILINE)
    assert found and int(found[2]) >= times
