"""Run ``hdtool serve`` in a process, as users do, on a free port."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300.0
"""Timeout of a start in seconds. The first start compiles the drafters."""


ALWAYS_DRAFTS = ("--draft-tokens", "16")
"""Options that make the server draft. By default, timings at the start decide, which a busy machine may distort."""


class RunningServer:
    """Context manager that runs a server."""

    def __init__(self, log: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self._log, self._options = log, options
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}

    def __enter__(self) -> RunningServer:
        hdtool = Path(sys.executable).parent / "hdtool"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [hdtool, "serve", *self._options, "--port", "0", "--threads", "1"],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        started = time.monotonic()
        while not (found := re.search(r"listens on http://[^ ]*:(\d+)/v1", self.log)):
            assert self.process.poll() is None, self.log[-4000:]
            assert time.monotonic() - started < TIMEOUT_SECONDS, self.log[-4000:]
            time.sleep(0.1)
        self.port = int(found[1])
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def end(self) -> None:
        """Stop the server, and check that it has met no error and has no answer left."""
        metrics = self.ask("/metrics")[1]
        assert "Traceback" not in self.log, self.log[-3000:]
        assert all(f"hdtool_{name}_answers 0.0" in metrics for name in ("running", "waiting")), metrics
        assert self.stop() == 0

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return the status and the JSON or text of a response. A ``body`` other than bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text
