"""Write ``docs/reference/commands.md`` from ``--help``: ``make docs``; with ``--check`` only compare."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from hdtool.cli.app import run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "commands.md"
STORES = ("build-model-db", "build-corpus-db", "collect", "convert", "inspect", "merge", "add", "drop", "stores")
COMMANDS = (
    "",
    "setup",
    "generate",
    "chat",
    *STORES,
    "train-heads",
    "export",
    "serve",
    "serve --engine vllm",
    "replay",
    "verify",
    "bench",
    "bench-cost",
    "bench-shape",
    "demo",
    "doctor",
)

INTRODUCTION = """\
# Command reference

The output of `hdtool COMMAND --help`, written by `make docs`; `make test` checks that it is current.

Exit codes: 0 success, 1 an error that you can fix (one line on standard error says how), 2 bad usage,
130 interrupted by Ctrl-C, 141 a closed pipe. An option that has no effect with the chosen method or with
another option is bad usage.
"""


def render() -> str:
    sections = [INTRODUCTION]
    for command in COMMANDS:
        name = f"hdtool {command}".strip()
        sections.append(f"## {name}\n\n```\n{_help(command)}\n```\n")
    return "\n".join(sections)


def _help(command: str) -> str:
    """Of a terminal of 100 columns, in this process: to start Python for each command takes most of the time."""
    with patch.dict(os.environ, {"COLUMNS": "100"}), redirect_stdout(StringIO()) as shown:
        code = run([*command.split(), "--help"])
    assert code == 0, command
    return shown.getvalue().rstrip()


def main() -> None:
    current = render()
    if "--check" not in sys.argv:
        PAGE.write_text(current, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != current:
        sys.exit(f"error: {PAGE.relative_to(ROOT)} is out of date: run `make docs` and commit it")


if __name__ == "__main__":
    main()
