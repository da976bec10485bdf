"""One line on standard error for each finished request: what it cost, and nothing of what it said."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hdtool.runtime.config.serving import JSON_LINES
from hdtool.runtime.integrations.server.protocol.responses import usage_of

if TYPE_CHECKING:
    from hdtool.runtime.integrations.server.answers import Answers

ENTRY = "hdtool.request"
"""The key of the entry in the scope of a request."""
POLLED = ("/health", "/metrics")
"""Paths that monitors ask all the time; only failures of them are logged."""
LONGEST_PATH = 200


@dataclass
class Entry:
    """What the handlers of a request tell about it."""

    status: int = 500
    error: str | None = None
    """The code or the type of an error; its message could quote the request."""
    model: str | None = None
    tenant: str | None = None
    answers: Answers | None = None


class RequestLog:
    """ASGI middleware that gives each request an entry, and prints it when the request has ended."""

    def __init__(self, app: ASGIApp, *, shown: bool, form: str) -> None:
        self._app, self._shown, self._form = app, shown, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope[ENTRY] = Entry()
        started = time.monotonic()

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            entry.status = 500
            raise
        finally:
            if self._shown and not (scope["path"] in POLLED and entry.status < 400):
                seconds = time.monotonic() - started
                with suppress(OSError):  # the terminal is gone: requests are answered all the same
                    print(_line(scope, entry, seconds, self._form), file=sys.stderr, flush=True)


def _line(scope: Scope, entry: Entry, seconds: float, form: str) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = quote(scope["path"], safe="/:")[:LONGEST_PATH]
    figures = _figures(entry, seconds)
    if form == JSON_LINES:
        return json.dumps(
            {"time": moment, "method": scope["method"], "path": path, "status": entry.status, **figures},
            ensure_ascii=False,
        )
    named = (f"{name}={_word(value)}" for name, value in figures.items())
    return " ".join((moment, scope["method"], path, str(entry.status), *named))


def _figures(entry: Entry, seconds: float) -> dict[str, Any]:
    made: dict[str, Any] = {"error": entry.error, "model": entry.model, "tenant": entry.tenant or None}
    if entry.answers is not None:
        stats = entry.answers.stats
        usage = usage_of(entry.answers.prompt_tokens, stats)
        made |= {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": stats.tokens,
            "tokens_per_step": round(stats.tokens / stats.steps, 2) if stats.steps else None,
            "tokens_per_second": round(stats.tokens / seconds, 1) if stats.tokens and seconds else None,
        }
    return {name: value for name, value in (made | {"seconds": round(seconds, 3)}).items() if value is not None}


def _word(value: object) -> str:
    """A value without spaces, as names of models may have them."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\t\n\r') else text
