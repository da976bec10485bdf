"""Write ``docs/reference/commands.md`` from ``--help``: ``make docs``; with ``--check`` only compare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "commands.md"
STORES = ("build-model-db", "build-corpus-db", "collect", "inspect", "merge", "add", "drop")
COMMANDS = (
    "",
    "generate",
    *STORES,
    "train-heads",
    "serve",
    "replay",
    "verify",
    "bench",
    "bench-cost",
    "bench-shape",
    "demo",
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
    arguments = [*command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONUTF8": "1"}
    shown = subprocess.run(
        [sys.executable, "-m", "hdtool.cli", *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return shown.stdout.rstrip()


def main() -> None:
    current = render()
    if "--check" not in sys.argv:
        PAGE.write_text(current, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != current:
        sys.exit(f"error: {PAGE.relative_to(ROOT)} is out of date: run `make docs` and commit it")


if __name__ == "__main__":
    main()
