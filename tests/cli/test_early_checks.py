"""Mistakes that the command line finds before it loads libraries and models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "Hello.", "--model-db"],
        ["generate", "Hello.", "--corpus-db"],
        ["chat", "--model-db"],
        ["serve", "--corpus-db"],
        ["bench", "--model-db"],
        ["verify", "--model-db"],
        ["verify", "--prompts"],
        ["setup", "model", "--logs"],
    ],
    ids=" ".join,
)
def test_what_is_missing_is_found_before_torch_is_imported(command: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from hdtool.cli.app import run
code = run({[*command, str(tmp_path / "missing")]!r})
sys.exit(code if "torch" not in sys.modules else 99)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") and str(tmp_path / "missing") in done.stderr
