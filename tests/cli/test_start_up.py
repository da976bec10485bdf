"""Commands that run no model load none of the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "tokenizers", "numpy", "rich", "jinja2", "matplotlib"}
COMMANDS = [
    ["--help"],
    ["--version"],
    ["generate", "--help"],
    ["demo", "--help"],
    ["generate", "--top-p", "7"],
    ["bench", "--num-prompts", "0"],
    ["bench-cost", "--help"],
    ["generate", "--method", "lade", "--draft-tokens", "4"],
    ["serve", "--help"],
    ["serve", "--port", "90000"],
    ["serve", "--engine", "vllm", "--port", "9"],
]
RUN_EACH = f"""
import json, sys
from hdtool.cli.app import run
for arguments in json.load(sys.stdin):
    run(arguments)
    if heavy := {HEAVY!r} & set(sys.modules):
        sys.exit(f"{{arguments}} imports {{sorted(heavy)}}")
"""


def test_nothing_heavy_is_imported() -> None:
    process = [sys.executable, "-c", RUN_EACH]
    result = subprocess.run(process, input=json.dumps(COMMANDS), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
