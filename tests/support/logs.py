"""Run ``convert`` on a log, for tests of inputs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hdtool.cli.app import run

SECRET = "sk-0123456789abcdef"
ASKED = {"role": "user", "content": "What is a list?"}
ANSWER = {"role": "assistant", "content": "A sequence."}
GOOD = json.dumps({"messages": [ASKED, ANSWER]})
REQUEST = {"messages": [ASKED]}
OK = {"choices": [{"message": ANSWER}]}
RESPONSES = (
    "create table responses (id text, conversation_id text, prompt text, system text, response text, datetime_utc text)"
)
"""Table of ``llm`` up to version 0.31."""


def said(answer: str, *before: dict[str, str]) -> list[dict[str, str]]:
    return [*before, ASKED, {"role": "assistant", "content": answer}]


def converted(path: Path, capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[Any], list[str]]:
    """Convert a file. Returns the exit code, the rows that ``convert`` wrote, and the lines of standard error."""
    out = path.with_name("converted.jsonl")
    code = run(["convert", str(path), "--out", str(out), "--quiet", *options])
    printed = capfd.readouterr()
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    assert SECRET not in printed.err + printed.out + json.dumps(rows)
    return code, rows, printed.err.splitlines()


def database(*statements: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with closing(sqlite3.connect(path)) as opened:
            opened.executescript(";".join(statements))

    return write
