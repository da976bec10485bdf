"""Commands that run no model load none of the heavy libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "rich", "jinja2", "matplotlib")


@pytest.mark.parametrize(
    "arguments",
    [
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
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from hdtool.cli.app import run\n"
        f"run({arguments!r})\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
