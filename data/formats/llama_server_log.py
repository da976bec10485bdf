"""Requests in the log of llama-server with ``--verbose``: the body of a request, then that of its answer.

The lines carry no id. An answer belongs to the earliest request without one. The body of a streamed answer is empty in
the log; the chunks before it, which have ids, are joined instead.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hdtool.data.formats.row import RowError, parsed

STATUS = re.compile(r"log_server_r\w*: (?:done )?request: (?P<method>[A-Z]+) (?P<path>/\S*)")
REQUEST = re.compile(r"log_server_r\w*: request:\s+(?P<body>\{.*)")
RESPONSE = re.compile(r"log_server_r\w*: response:\s*(?P<body>.*)")
STREAMED = re.compile(r"(?:streamed chunk: |^)data: (?P<body>\{.*)")
ASKING = ("completion", "responses", "messages", "infill")
"""Parts of the paths of requests for text."""


class LlamaServerLog:
    """Pairs the requests and the answers of a log."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, Any]] = deque()
        self._chunks: dict[str, list[Any]] = {}
        self._path = ""

    def concerns(self, line: bytes) -> bool:
        return b"log_server_r" in line or b"streamed chunk: " in line or line.startswith(b"data: {")

    def read(self, line: str, number: int) -> Iterator[Any]:
        """The exchanges that a line completes."""
        if status := STATUS.search(line):
            self._path = status["path"]
        elif request := REQUEST.search(line):
            self._requests.append((number, _body(request["body"])))
        elif response := RESPONSE.search(line):
            if self._requests and (exchange := self._exchange(response["body"].strip())):
                yield exchange
        elif streamed := STREAMED.search(line):
            with suppress(RowError):
                chunk = parsed(streamed["body"])
                self._chunks.setdefault(str(chunk.get("id")), []).append(chunk)

    def unanswered(self) -> Iterator[tuple[int, Any]]:
        """The requests without an answer, with their lines."""
        for number, request in self._requests:
            yield number, request if isinstance(request, RowError) else {"request": request}

    def _exchange(self, answer: str) -> Any:
        _, request = self._requests.popleft()
        path, self._path = self._path, ""
        if path and not any(part in path for part in ASKING):
            return None
        if isinstance(request, RowError):
            return request
        if not answer and self._chunks:
            return {"request": request, "response": self._chunks.pop(next(iter(self._chunks)))}
        try:
            return {"request": request, "response": parsed(answer)} if answer else {"request": request}
        except RowError as fault:
            return RowError(f"an answer in llama-server's log is {fault}")


def _body(text: str) -> Any:
    try:
        return parsed(text)
    except RowError as fault:
        return RowError(f"a request in llama-server's log is {fault}")
