"""Write ``docs/reference/commands.md`` from ``--help-all``: ``make docs``; with ``--check`` only compare."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.main import get_command

from hdtool.cli.app import VLLM_COMMAND, app, run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "commands.md"
NAMES: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
COMMANDS = ["", *("serve --engine vllm" if name == VLLM_COMMAND else name for name in NAMES)]
"""The commands as they are typed."""

INTRODUCTION = """\
# Command reference

The output of `hdtool --help`, and of `hdtool COMMAND --help-all` for each command, written by `make docs`; `make test`
checks that it is current. `hdtool COMMAND --help` fits on a screen: where not all options do, it leaves out what few
users need.

Exit codes: 0 success, 1 an error that you can fix (one line on standard error says how), 2 bad usage,
130 interrupted by Ctrl-C, 141 a closed pipe. Options that have no effect with the chosen
method or with another option are refused.
"""


def render() -> str:
    sections = [INTRODUCTION]
    for typed in COMMANDS:
        shown = _help(typed, "--help-all" if typed else "--help")
        sections.append(f"## {f'hdtool {typed}'.strip()}\n\n```\n{shown}\n```\n")
    return "\n".join(sections)


def _help(command: str, option: str) -> str:
    """Of a terminal of 100 columns, in this process: to start Python for each command takes most of the time."""
    with patch.dict(os.environ, {"COLUMNS": "100"}), redirect_stdout(StringIO()) as shown:
        code = run([*command.split(), option])
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
