"""Detects finished answers in vLLM, and appends them to a history.

vLLM does not tell a drafter when a request ends. An answer is finished once another answer follows it in its context
table, or if no step has drafted for it for some time. A timer checks this, because no step follows the last answer. A
request that continues later, such as a preempted one, begins another answer after its last tokens.
"""

from __future__ import annotations

import time
import weakref
from multiprocessing.util import Finalize
from threading import Lock, Timer
from typing import Any

import numpy as np

from hdtool.runtime.integrations.vllm.draft_chains import NUM_ENDED, RequestStates
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.history_store import History


def appends_history(parallel: Any) -> bool:
    """Return True for the one worker of each model replica in vLLM that appends to the history.

    All tensor parallel workers of the last pipeline stage draft for the same requests, and vLLM uses the drafts of the
    first one.
    """
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    last = stage * (parallel.pipeline_parallel_size - 1)
    return bool(parallel.rank % (stage * parallel.pipeline_parallel_size) == last)


CHECK_SECONDS = 0.5
"""Seconds between two checks while an answer is in progress."""
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 1.0, 10.0
"""Bounds on the idle time, in seconds without a step, after which an answer is finished."""
IDLE_STEPS = 4.0
"""Idle time as a multiple of the duration of a slow step, within the bounds; on some devices, a step takes seconds.

A step lasts from the end of the previous one; pauses longer than the upper bound are ignored.
"""
FIRST_STEP_SECONDS, SLOW_STEP_DECAY = 1.25, 0.95
"""Initial duration of a slow step, and its decay per step, because the first steps of an engine are slow."""


class AnswerCollector:
    """Appends finished answers to a stored history; hold ``lock`` while reading or writing the history's logs."""

    def __init__(self, history: History, requests: RequestStates) -> None:
        self.lock = Lock()
        self._history, self._requests = history, requests
        self._followed_lanes: list[Ints] = []
        """Lanes of answers that were followed by another answer since the last check."""
        self._last_drafted = np.zeros(len(requests.lanes) + 1)
        """Time of the last step that drafted for each request; the last item is for rows without a table."""
        self._last, self._slow_step_seconds = -np.inf, FIRST_STEP_SECONDS
        self._timer: Timer | None = None
        # Runs at the end of the process, even if multiprocessing started the process.
        Finalize(None, _finish_all, (weakref.ref(self),), exitpriority=0)

    def observe(self, chosen: Ints, at: float) -> None:
        """Record that a step drafted for the ``chosen`` requests at the time ``at``; the caller must hold ``lock``."""
        self._last_drafted[chosen] = at
        since, self._last = at - self._last, at
        self._slow_step_seconds = max(
            SLOW_STEP_DECAY * self._slow_step_seconds, since if since < MAX_IDLE_SECONDS else 0.0
        )
        if ended := int(self._requests.answers[NUM_ENDED]):
            self._followed_lanes += np.split(self._requests.ended[:ended].copy(), ended)
            self._requests.answers[NUM_ENDED] = 0
        if self._timer is None:
            self._refresh()
            self._start_timer()

    def finish_all(self) -> None:
        """Append all answers to the history, including those in progress; the caller must not hold ``lock``."""
        with self.lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            self._append(np.inf)

    def _check(self) -> None:
        with self.lock:
            self._timer = None
            self._refresh()
            self._append(
                time.perf_counter() - min(max(MIN_IDLE_SECONDS, IDLE_STEPS * self._slow_step_seconds), MAX_IDLE_SECONDS)
            )
            if self._requests.lanes["owner"].any():
                self._start_timer()

    def _append(self, cutoff: float) -> None:
        """Append the answers that were followed by another, and those whose last step was no later than ``cutoff``."""
        followed, self._followed_lanes = self._followed_lanes, []
        for lane in followed:
            self._history.finish(lane)
        lanes = self._requests.lanes
        for request in np.flatnonzero((lanes["owner"] > 0) & (self._last_drafted[:-1] <= cutoff)):
            self._history.finish(lanes[request : request + 1])

    def _refresh(self) -> None:
        """Load the answers that other processes have added to the history."""
        if self._history.store:
            self._history.store.refresh()

    def _start_timer(self) -> None:
        self._timer = Timer(CHECK_SECONDS, self._check)
        self._timer.daemon = True
        self._timer.start()


def _finish_all(reference: weakref.ref[AnswerCollector]) -> None:
    if collector := reference():
        collector.finish_all()
