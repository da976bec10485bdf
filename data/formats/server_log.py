"""Requests and their answers in the logs of servers, and JSON after a prefix in logs of any program.

vLLM and llama-server write a request and its answer in lines of their own, which are paired here. All other lines of a
log are passed over.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from hdtool.data.errors import RecordError
from hdtool.data.formats.json_rows import PREFIX, value_of_line
from hdtool.data.formats.llama_server_log import LlamaServerLog
from hdtool.data.formats.row import CountedFile, Row, RowError, decoded
from hdtool.data.formats.vllm_log import VllmLog

MARKS = re.compile(
    rb"log_server_r|llama_model_loader: |^srv {2}|(?:Received request|Generated response) \S|vLLM API server",
    re.MULTILINE,
)
"""What the first lines of these logs contain."""
BODY_KEYS = ("messages", "conversations", "conversation", "request", "response", "body", "choices", "prompt", "input")
LINES_TRIED = 50


def is_server_log(head: bytes) -> bool:
    """Whether a file without a known ending is a log, by its beginning."""
    if MARKS.search(head):
        return True
    lines = head.splitlines()[:LINES_TRIED]
    return any(PREFIX.match(line.decode(errors="replace")) and _is_body(value_of_line(line)) for line in lines)


def log_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    """A row for each request; its value has a ``request``, a ``response`` or both, or is the JSON of the line."""
    logs = (VllmLog(), LlamaServerLog())
    found = False
    for number, line in enumerate(stream, start=1):
        for value in _values(line, number, logs):
            found = True
            yield Row(f":{number}", value, raw.count, number)
    for log in logs:
        for number, value in log.unanswered():
            found = True
            yield Row(f":{number}", value, raw.count, number)
    if not found:
        raise RecordError(
            f"{raw.path} is a log without the bodies of requests: start vLLM with --enable-log-requests and "
            "--enable-log-outputs at VLLM_LOGGING_LEVEL=DEBUG, llama-server with --verbose, or name a text file .txt"
        )


def _values(line: bytes, number: int, logs: tuple[VllmLog, LlamaServerLog]) -> Iterator[Any]:
    for log in logs:
        if log.concerns(line):
            try:
                yield from log.read(decoded(line), number)
            except RowError as fault:
                yield fault
            return
    if b'{"' in line and _is_body(value := value_of_line(line)):
        yield value


def _is_body(value: Any) -> bool:
    return isinstance(value, dict) and any(_is_nested(value.get(key)) for key in BODY_KEYS)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and value.lstrip()[:1] in ("{", "["))
