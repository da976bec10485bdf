"""What operators see of the requests: the figures of ``/metrics`` for Prometheus, and a log of one line for each."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hdtool.runtime.config.serving import JSON_LINES
from hdtool.runtime.integrations.server.engine import Scheduler
from hdtool.runtime.sequence import Step

if TYPE_CHECKING:
    from hdtool.runtime.integrations.server.answers import Answers

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper ends of the histograms, in seconds."""
ENTRY = "hdtool.request"
"""The key of the entry in the scope of a request."""
POLLED = ("/health", "/metrics")
"""Paths that monitors ask all the time; only failures of them are logged."""
LONGEST_PATH = 200


class Metrics:
    """Counters of one server."""

    def __init__(self, engine: Scheduler) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=BUCKETS)
        self._requests = counter("hdtool_requests", "Requests, by path and status.", ["path", "status"])
        self._tokens = counter("hdtool_generated_tokens", "Tokens of answers.")
        self._prompt_tokens = counter("hdtool_prompt_tokens", "Tokens of prompts.")
        self._cached = counter("hdtool_cached_prompt_tokens", "Tokens of prompts not read again.")
        self._drafted = counter("hdtool_draft_tokens", "Draft tokens, by source.", ["source"])
        self._accepted = counter("hdtool_accepted_draft_tokens", "Accepted draft tokens, by source.", ["source"])
        self._steps = counter("hdtool_steps", "Forward passes, summed over the answers in them.")
        self._first = histogram("hdtool_time_to_first_token_seconds", "From the end of a request to its first token.")
        self._whole = histogram("hdtool_answer_seconds", "From the end of a request to its last token.")
        running = gauge("hdtool_running_answers", "Answers that are being generated.")
        running.set_function(lambda: engine.running)
        waiting = gauge("hdtool_waiting_answers", "Answers that wait for a place.")
        waiting.set_function(lambda: engine.waiting)
        kept = gauge("hdtool_prefix_cache_bytes", "Bytes of the contexts that are kept.")
        kept.set_function(lambda: engine.prefixes.bytes if engine.prefixes else 0)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def step(self, step: Step, prompt_tokens: int, submitted: float, *, is_first: bool) -> None:
        """Count one step of an answer to a prompt."""
        self._tokens.inc(len(step.tokens))
        self._steps.inc()
        waited = time.monotonic() - submitted
        if is_first:
            self._prompt_tokens.inc(prompt_tokens)
            self._cached.inc(step.cached_tokens)
            self._first.observe(waited)
        if step.finish:
            self._whole.observe(waited)

    def drafts(self, source: str, drafted: int, accepted: int) -> None:
        """Count the draft tokens of an answer that has ended."""
        self._drafted.labels(source).inc(drafted)
        self._accepted.labels(source).inc(accepted)

    def text(self) -> bytes:
        return generate_latest(self._registry)


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
        usage = entry.answers.usage
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
