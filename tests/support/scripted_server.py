"""Server that shows the chat page and gives the answers that a test scripts, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

from hdtool.runtime.integrations.server.chat_page import chat_page, page_headers
from hdtool.runtime.settings.draft_sources import registered
from tests.support.http_server import serving

Row = dict[str, Any]
Answer = Callable[[Row], Iterable[Row]]
"""Function that returns the events of the answer to a request."""
STATE: Row = {
    "model": "demo",
    "answers": {"running": 0, "waiting": 0, "max_running": 8},
    "cache": {"slot_tokens": 1234, "bytes": 3 * 2**20, "max_bytes": 2**30},
    "stores": [{"kind": "corpus", "name": "corpus", "inputs": ["documents.jsonl"], "tokens": 599_984}],
    "sources": {source.name: {"light": source.light, "dark": source.dark} for source in registered().values()},
}
END: Row = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def step(*tokens: tuple[str, str], finish: str | None = None) -> Row:
    """Return the event of a step; a token is ``(source, text)``."""
    drafted = [{"source": source, "text": text} for source, text in tokens]
    return {"choices": [{"index": 0, "finish_reason": finish, "hdtool": {"steps": 1, "tokens": drafted}}]}


class ScriptedServer(ThreadingHTTPServer):
    """Server that answers chats with the function ``answer``; if that raises ConnectionError, the answer breaks off."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.state = STATE
        self.key = ""
        """Key that requests need; empty if they need none."""
        self.refusal: tuple[int, str] | None = None
        """Status and message with which to refuse the next chat."""
        self.asked: list[Row] = []
        """Bodies of the chats."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, such as those of clients that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, {"Content-Type": "text/html; charset=utf-8", **page_headers()}, chat_page())
        elif self._is_admitted():
            self._send_json(200, self.server.state)

    def do_POST(self) -> None:
        if not self._is_admitted():
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        refusal, self.server.refusal = self.server.refusal, None
        if refusal:
            self._send_json(refusal[0], {"error": {"message": refusal[1]}})
            return
        self._send(200, {"Content-Type": "text/event-stream"}, "")
        try:
            for row in chain(self.server.answer(body), [None]):
                self.wfile.write(f"data: {json.dumps(row) if row else '[DONE]'}\n\n".encode())
        except ConnectionError:
            pass

    def _is_admitted(self) -> bool:
        if self.headers.get("Authorization", "") == (self.server.key and f"Bearer {self.server.key}"):
            return True
        self._send_json(401, {"error": {"message": "the API key is missing or wrong"}})
        return False

    def _send_json(self, status: int, row: Row) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(row))

    def _send(self, status: int, headers: dict[str, str], text: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


def scripted(answer: Answer) -> AbstractContextManager[ScriptedServer]:
    """Run a server whose chats ``answer`` answers."""
    return serving(ScriptedServer(answer))
