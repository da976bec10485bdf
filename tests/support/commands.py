"""Run commands in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hdtool.cli.app import run


def json_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the JSON that a command prints."""
    assert run([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """Return the one line of an expected failure; nothing else may be printed but notes."""
    capfd.readouterr()
    assert run(list(arguments)) == code
    found = capfd.readouterr()
    (line,) = (line for line in found.err.splitlines() if not line.startswith("note: "))
    assert line.startswith("error: ") and not found.out
    return line
