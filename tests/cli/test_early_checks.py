"""Mistakes that the command line finds before it loads libraries and models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMANDS = [
    ["generate", "Hello.", "--model-db"],
    ["generate", "Hello.", "--corpus-db"],
    ["chat", "--model-db"],
    ["serve", "--corpus-db"],
    ["bench", "--model-db"],
    ["verify", "--model-db"],
    ["verify", "--prompts"],
    ["setup", "model", "--logs"],
]
RUN_EACH = """
import json, sys
from hdtool.cli.app import run
for command in json.load(sys.stdin):
    print(run(command), "torch" in sys.modules, flush=True)
    print("end of", *command, file=sys.stderr, flush=True)
"""


def test_what_is_missing_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    commands = [[*command, missing] for command in COMMANDS]
    process = [sys.executable, "-c", RUN_EACH]
    done = subprocess.run(process, input=json.dumps(commands), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 False"] * len(commands), done.stderr
    errors = done.stderr
    for command in commands:
        error, _, errors = errors.partition(f"end of {' '.join(command)}\n")
        assert error.startswith("error: ") and missing in error, command
