"""llama.cpp's own server as a contender: plain, with n-grams, or with a draft model."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import finalize

import psutil
import torch

from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.errors import ModelError
from hdtool.runtime.core.request import room_for
from hdtool.runtime.core.step import Finish
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.target.load import Loaded

CONTEXT = 8192
START_SECONDS = 300.0
LOOKUP = ("--spec-type", "ngram-simple", "--spec-draft-n-max", "64")
"""Options that draft from n-grams of the context, as in llama.cpp's documentation."""


def draft_model_options(file: Path, threads: int) -> tuple[str, ...]:
    return ("--model-draft", str(file), "--spec-type", "draft-simple", "--spec-draft-threads", str(threads))


class LlamaServerContender:
    """Greedy answers of ``llama-server``, which starts anew for each fresh contender, so that nothing is remembered."""

    def __init__(self, loaded: Loaded, program: Path, file: Path, max_new_tokens: int, *options: str) -> None:
        self._loaded, self._program, self._file, self._options = loaded, program, file, options
        self._max_new_tokens = max_new_tokens
        self._server: psutil.Popen | None = None
        self._port = 0

    def fresh(self) -> LlamaServerContender:
        return LlamaServerContender(self._loaded, self._program, self._file, self._max_new_tokens, *self._options)

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        room, at_the_end = room_for(self._loaded.target, prompt, self._max_new_tokens)
        server = self._started()
        before, began = server.cpu_times(), time.perf_counter()
        found = self._asked(
            "POST",
            "/completion",
            {"prompt": prompt, "n_predict": room, "temperature": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
            | {"return_tokens": True},
        )
        seconds, after = time.perf_counter() - began, server.cpu_times()
        ended = found["stop_type"] == "eos"
        output_ids = list(map(int, found["tokens"]))
        if ended and (not output_ids or output_ids[-1] not in self._loaded.stops):
            output_ids.append(min(self._loaded.stops))
        timings = found["timings"]
        accepted = timings.get("draft_n_accepted", 0)
        return AnsweredTurn(
            text_of(self._loaded.tokenizer, output_ids),
            output_ids,
            _steps(len(output_ids), len(output_ids) - accepted),
            seconds,
            str(Finish.STOP if ended else at_the_end),
            nodes=timings.get("draft_n", 0),
            first_seconds=timings["prompt_ms"] / 1e3,
            cpu_seconds=after.user + after.system - before.user - before.system,
        )

    def _started(self) -> psutil.Popen:
        if self._server is None:
            with closing(socket.socket()) as free:
                free.bind(("127.0.0.1", 0))
                self._port = free.getsockname()[1]
            threads = torch.get_num_threads()
            options: dict[str, object] = {
                "-m": self._file,
                "-c": CONTEXT,
                "-t": threads,
                "-tb": threads,
                "--port": self._port,
            }
            options |= {"--parallel": 1, "--cache-ram": 0}
            self._server = psutil.Popen(
                [self._program, *(str(part) for option in options.items() for part in option), *self._options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            finalize(self, _stop, self._server)
            self._wait()
        return self._server

    def _wait(self) -> None:
        assert self._server
        began = time.monotonic()
        while self._server.poll() is None and time.monotonic() - began < START_SECONDS:
            try:
                if self._asked("GET", "/health").get("status") == "ok":
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.1)
        raise ModelError(
            f"{self._program} does not serve {self._file} with {' '.join(self._options)}: run it to see why"
        )

    def _asked(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)) as connection:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found


def _steps(tokens: int, steps: int) -> list[int]:
    """Return ``tokens`` spread over ``steps`` passes, as the server reports no more than their numbers."""
    return [tokens // steps + (place < tokens % steps) for place in range(steps)] if steps else []


def _stop(server: psutil.Popen) -> None:
    server.kill()
    server.wait()
