"""Metrics of a server, in Prometheus' format."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hdtool.runtime.core.step import Step
from hdtool.runtime.integrations.server.engine_thread import EngineThread

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of the histogram buckets, in seconds."""


class Metrics:
    """The Prometheus metrics of one server."""

    def __init__(self, engine: EngineThread) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=LATENCY_BUCKETS)
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
        """Count one step of an answer; ``submitted`` is the monotonic time at which its job was submitted.

        ``prompt_tokens`` is 0 if another answer to the same prompt counts them.
        """
        self._tokens.inc(len(step.tokens))
        self._steps.inc()
        waited = time.monotonic() - submitted
        if is_first:
            self._prompt_tokens.inc(prompt_tokens)
            self._cached.inc(min(step.cached_tokens, prompt_tokens))
            self._first.observe(waited)
        if step.finish:
            self._whole.observe(waited)

    def drafts(self, source: str, drafted: int, accepted: int) -> None:
        """Count the draft tokens of a source in the answers to a request that has ended."""
        self._drafted.labels(source).inc(drafted)
        self._accepted.labels(source).inc(accepted)

    def text(self) -> bytes:
        return generate_latest(self._registry)
