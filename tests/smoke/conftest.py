"""Commands of the installed hdtool, in a home of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

START_SECONDS = 600.0
"""The first start compiles the drafters."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HDTOOL_HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def serving(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], AbstractContextManager[str]]:
    """Start a command that serves, and yield the address of its API."""

    @contextmanager
    def started(command: str) -> Iterator[str]:
        log = tmp_path_factory.mktemp("server") / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(command.split(), env=environment, stdout=stream, stderr=stream)
        try:
            begun = time.monotonic()
            while not (found := re.search(r"listens on (http://[^ ]*:\d+/v1)", log.read_text())):
                assert process.poll() is None and time.monotonic() - begun < START_SECONDS, log.read_text()[-4000:]
                time.sleep(0.2)
            yield found[1]
        finally:
            process.kill()
            process.wait()

    return started
