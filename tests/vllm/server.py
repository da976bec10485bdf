"""A server as users start it, and streaming requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.vllm.engine import HERE, ROOT, TIMEOUT_SECONDS


class Server:
    """``hdtool serve`` on a free port of this machine, until the end of the block."""

    def __init__(self, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        self._options = options

    def __enter__(self) -> Server:
        hdtool = Path(sys.executable).parent / "hdtool"
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, **HERE, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [hdtool, "serve", "--engine", "vllm", *self._options, *place],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
        started = time.monotonic()
        while not self.answers():
            assert self._process.poll() is None, self.log[-4000:]
            assert time.monotonic() - started < TIMEOUT_SECONDS, self.log[-4000:]
            time.sleep(0.5)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            with self._asked("GET", "/health") as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self._process.wait(120)

    def metric(self, name: str) -> float:
        with self._asked("GET", "/metrics") as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " ")))

    def stream(self, prompt: list[int], sampling: dict[str, Any], cancel_after: int | None = None) -> list[int]:
        """The token ids of a streamed answer; after so many of them the connection is closed."""
        body = {"model": "demo", "prompt": prompt, "stream": True, "return_token_ids": True, **sampling}
        ids: list[int] = []
        with self._asked("POST", "/v1/completions", body) as response:
            assert response.status == 200, response.read()
            for line in response:
                told = line.decode().removeprefix("data:").strip()
                if told == "[DONE]":
                    break
                if told:
                    ids += json.loads(told)["choices"][0].get("token_ids") or []
                if cancel_after is not None and len(ids) >= cancel_after:
                    break
        return ids

    @contextmanager
    def _asked(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()


def children(pid: int) -> list[tuple[int, str]]:
    """The processes that a process started, and those that these started: ids and command lines."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid:
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [(int(place.name), words), *children(int(place.name))]
        except (OSError, IndexError):
            continue  # it has just ended
    return found
