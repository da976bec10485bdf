"""The figures of ``/metrics``, in the format of Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hdtool.runtime.decode import Step
from hdtool.runtime.integrations.server.engine.loop import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self, engine: Engine) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "hdtool_requests", "Requests, by path and status.", ["path", "status"], registry=registry
        )
        self._tokens = Counter("hdtool_generated_tokens", "Tokens of answers.", registry=registry)
        self._prompt_tokens = Counter("hdtool_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("hdtool_cached_prompt_tokens", "Tokens of prompts not read again.", registry=registry)
        self._drafted = Counter("hdtool_draft_tokens", "Draft tokens, by source.", ["source"], registry=registry)
        self._accepted = Counter(
            "hdtool_accepted_draft_tokens", "Accepted draft tokens, by source.", ["source"], registry=registry
        )
        self._steps = Counter("hdtool_steps", "Forward passes, summed over the answers in them.", registry=registry)
        self._first = Histogram(
            "hdtool_time_to_first_token_seconds",
            "From the end of a request to its first token.",
            registry=registry,
            buckets=SECONDS,
        )
        self._whole = Histogram(
            "hdtool_answer_seconds", "From the end of a request to its last token.", registry=registry, buckets=SECONDS
        )
        running = Gauge("hdtool_running_answers", "Answers that are being generated.", registry=registry)
        running.set_function(lambda: engine.running)
        waiting = Gauge("hdtool_waiting_answers", "Answers that wait for a place.", registry=registry)
        waiting.set_function(lambda: engine.waiting)
        kept = Gauge("hdtool_prefix_cache_bytes", "Bytes of the contexts that are kept.", registry=registry)
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
