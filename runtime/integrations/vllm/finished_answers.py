"""Appends answers to the history store once they are finished.

vLLM does not report the end of a request to a drafter. An answer is finished when another one follows it in its context
table, or when no step has drafted for it for a while, which a timer observes: after the last answer there is no step.
A request that continues later, such as a preempted one, begins another answer with the last tokens before.
"""

from __future__ import annotations

import time
import weakref
from multiprocessing.util import Finalize
from threading import Lock, Timer
from typing import Any

import numpy as np

from hdtool.runtime.integrations.vllm.chain import NUM_ENDED, RequestStates
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.history_store import History


def appends_history(parallel: Any) -> bool:
    """Return True if a worker of vLLM appends to the history: the one whose drafts count, of those that run one model.

    All tensor parallel workers of the last pipeline stage draft for the same requests, and vLLM takes the drafts of the
    first one.
    """
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    last = stage * (parallel.pipeline_parallel_size - 1)
    return bool(parallel.rank % (stage * parallel.pipeline_parallel_size) == last)


CHECK_SECONDS = 0.5
"""Seconds between two checks, as long as an answer is in progress."""
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 1.0, 10.0
"""Bounds of the seconds without a step after which an answer is finished."""
IDLE_STEPS = 4.0
"""Between these bounds, they are the time of so many steps, slow ones of late: on some devices a step takes seconds.

The time between two steps is that of a step unless it is longer than the upper bound.
"""
FIRST_STEP_SECONDS, SLOW_STEP_DECAY = 1.25, 0.95
"""Seconds of a slow step to begin with, and how they decrease with each step: the first ones of an engine are slow."""


class FinishedAnswers:
    """The answers in progress of a history that lasts; ``lock`` is held while its logs are read or written."""

    def __init__(self, history: History, requests: RequestStates) -> None:
        self.lock = Lock()
        self._history, self._requests = history, requests
        self._followed: list[Ints] = []
        """The lanes of answers that others followed since the last check."""
        self._seen = np.zeros(len(requests.lanes) + 1)
        """When a step drafted for each request lately; the last number is for rows without a table."""
        self._last, self._slowest = -np.inf, FIRST_STEP_SECONDS
        self._timer: Timer | None = None
        # Called at the end of this process, also where multiprocessing started it.
        Finalize(None, _finish_all, (weakref.ref(self),), exitpriority=0)

    def observe(self, chosen: Ints, at: float) -> None:
        """Note the requests that a step has drafted for; the caller holds the lock."""
        self._seen[chosen] = at
        since, self._last = at - self._last, at
        self._slowest = max(SLOW_STEP_DECAY * self._slowest, since if since < MAX_IDLE_SECONDS else 0.0)
        if ended := int(self._requests.answers[NUM_ENDED]):
            self._followed += np.split(self._requests.ended[:ended].copy(), ended)
            self._requests.answers[NUM_ENDED] = 0
        if self._timer is None:
            self._refresh()
            self._start_timer()

    def finish_all(self) -> None:
        """Append all answers, those in progress as far as they went."""
        with self.lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            self._append(np.inf)

    def _check(self) -> None:
        with self.lock:
            self._timer = None
            self._refresh()
            self._append(time.perf_counter() - min(max(MIN_IDLE_SECONDS, IDLE_STEPS * self._slowest), MAX_IDLE_SECONDS))
            if self._requests.lanes["owner"].any():
                self._start_timer()

    def _append(self, before: float) -> None:
        """Append the answers that others followed, and those whose last step was ``before``."""
        followed, self._followed = self._followed, []
        for lane in followed:
            self._history.finish(lane)
        lanes = self._requests.lanes
        for request in np.flatnonzero((lanes["owner"] > 0) & (self._seen[:-1] <= before)):
            self._history.finish(lanes[request : request + 1])

    def _refresh(self) -> None:
        """See the answers of other processes."""
        if self._history.store:
            self._history.store.refresh()

    def _start_timer(self) -> None:
        self._timer = Timer(CHECK_SECONDS, self._check)
        self._timer.daemon = True
        self._timer.start()


def _finish_all(answers: weakref.ref[FinishedAnswers]) -> None:
    if finished := answers():
        finished.finish_all()
