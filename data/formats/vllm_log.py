"""Requests in the log of vLLM's server, which names a request by its id in every line about it.

``--enable-log-requests`` logs prompts as the chat template rendered them, since version 0.11 at the level DEBUG only,
and ``--enable-log-outputs`` logs answers. Some versions log the body of a request as JSON.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from hdtool.data.formats.rendered_prompt import messages_in
from hdtool.data.formats.row import RowError, parsed

TEXT = r"(?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
PROMPT = re.compile(rf"(?:Received request (?P<id>\S+): |Request (?P<named>\S+) details: )prompt: {TEXT}, ")
BODY = re.compile(r"Request (?P<id>\S+) JSON body: (?P<body>\{.*)")
ANSWER = re.compile(rf"Generated response (?P<id>\S+?)(?P<stream> \(streaming \w+\))?: output: {TEXT}, ")
BEGUN = re.compile(
    r"(?:Received request \S+: |Request \S+ details: )prompt: ['\"]|Generated response \S.*: output: ['\"]"
)
DELTA = " (streaming delta)"


class VllmLog:
    """Pairs the requests and the answers of a log."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, dict[str, Any]]] = {}

    def concerns(self, line: bytes) -> bool:
        return (
            b"Received request " in line
            or b"Generated response " in line
            or b" details: prompt" in line
            or (b" JSON body: {" in line)
        )

    def read(self, line: str, number: int) -> Iterator[Any]:
        """The exchanges that a line completes."""
        if body := BODY.search(line):
            self._requests[body["id"]] = number, parsed(body["body"])
        elif prompt := PROMPT.search(line):
            if (text := _text(prompt["text"])) and self._find(name := prompt["id"] or prompt["named"]) is None:
                self._requests[name] = number, _request(text)
        elif answer := ANSWER.search(line):
            if answer["stream"] != DELTA and (text := _text(answer["text"])):
                asked = self._requests.pop(self._find(answer["id"]) or "", None)
                yield {"id": answer["id"], "request": asked[1] if asked else None, "response": text}
        elif BEGUN.search(line):
            raise RowError("a line of vLLM's log that is cut off")

    def unanswered(self) -> Iterator[tuple[int, Any]]:
        """The requests without an answer, with their lines."""
        for name, (number, request) in self._requests.items():
            yield number, {"id": name, "request": request}

    def _find(self, name: str) -> str | None:
        """The id of a request by that of its answer: prompts of one request are numbered, bodies lack the start."""
        return next((one for one in (name, f"{name}-0", name.partition("-")[2]) if one in self._requests), None)


def _text(literal: str) -> str | None:
    try:
        text = ast.literal_eval(literal)
    except (ValueError, SyntaxError) as error:
        raise RowError(f"a line of vLLM's log with a damaged text ({error})") from None
    return text if isinstance(text, str) else None


def _request(prompt: str) -> dict[str, Any]:
    messages = messages_in(prompt)
    return {"prompt": prompt} if messages is None else {"messages": messages}
