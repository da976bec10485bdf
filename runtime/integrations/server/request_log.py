"""The log of requests: a line for each, with its status, token counts and duration."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hdtool.runtime.settings.serving import JSON_LINES

if TYPE_CHECKING:
    from hdtool.runtime.integrations.server.choice_stream import ChoiceStream
ENTRY_KEY = "hdtool.request"
"""Key of the ``LogEntry`` in the ASGI scope of a request."""
POLLED_PATHS = ("/health", "/metrics", "/v1/status")
"""Paths that monitoring and the chat page poll; only their failures are logged."""
MAX_LOGGED_PATH = 200


@dataclass
class LogEntry:
    """What the handlers of a request report for the log."""

    status: int = 500
    error: str | None = None
    """Code or type of an error; its message is not logged, because it could quote the request."""
    model: str | None = None
    tenant: str | None = None
    answers: ChoiceStream | None = None


class RequestLog:
    """ASGI middleware that gives each request a ``LogEntry`` and, if ``shown``, prints all but successful polls."""

    def __init__(self, app: ASGIApp, *, shown: bool, form: str) -> None:
        self._app, self._shown, self._form = app, shown, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope[ENTRY_KEY] = LogEntry()
        started = time.monotonic()

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:
            entry.status = 500
            raise
        finally:
            if self._shown and not (scope["path"] in POLLED_PATHS and entry.status < 400):
                seconds = time.monotonic() - started
                with suppress(OSError):  # a closed terminal must not fail the request
                    print(_line(scope, entry, seconds, self._form), file=sys.stderr, flush=True)


def _line(scope: Scope, entry: LogEntry, seconds: float, form: str) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = quote(scope["path"], safe="/:")[:MAX_LOGGED_PATH]
    figures = _figures(entry, seconds)
    if form == JSON_LINES:
        return json.dumps(
            {"time": moment, "method": scope["method"], "path": path, "status": entry.status, **figures},
            ensure_ascii=False,
        )
    named = (f"{name}={_without_spaces(value)}" for name, value in figures.items())
    return " ".join((moment, scope["method"], path, str(entry.status), *named))


def _figures(entry: LogEntry, seconds: float) -> dict[str, Any]:
    made: dict[str, Any] = {"error": entry.error, "model": entry.model, "tenant": entry.tenant or None}
    if entry.answers is not None:
        stats = entry.answers.stats
        usage = entry.answers.usage
        made |= {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": stats.tokens,
            "tokens_per_step": round(stats.tokens / stats.steps, 2) if stats.steps else None,
            "tokens_per_second": round(stats.tokens / seconds, 1) if stats.tokens and seconds else None,
        }
    return {name: value for name, value in (made | {"seconds": round(seconds, 3)}).items() if value is not None}


def _without_spaces(value: object) -> str:
    """Return a value as text, quoted as JSON if it is empty or contains spaces or special characters."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\t\n\r') else text
