"""The engine of a server: one thread that decodes the requested answers in a batch."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence

from hdtool.data.errors import HdtoolError
from hdtool.runtime.config import DecodeConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.integrations.server.engine.job import Job
from hdtool.runtime.integrations.server.engine.tenants import Tenants
from hdtool.runtime.loop import Loop, Outcome, Reading, Request
from hdtool.runtime.model.target import Target
from hdtool.runtime.prefix_cache import PrefixCache

PIECE_ALONE, PIECE_BESIDE = 512, 128
"""Tokens of a prompt that are read in one pass, without and with other answers that wait for it."""


class OverloadError(HdtoolError):
    """The server takes no more requests, or ends those that it has."""


class EngineError(Exception):
    """The engine failed; the message is for its log alone."""


class Scheduler:
    """Answers jobs in the order in which they were submitted, several at once."""

    def __init__(
        self, target: Target, tenants: Tenants, decoding: DecodeConfig, *, most_waiting: int, prefix_bytes: int
    ) -> None:
        self._target, self._tenants, self._decoding = target, tenants, decoding
        self._most_waiting = most_waiting
        self.prefixes = PrefixCache(prefix_bytes) if prefix_bytes and decoding.prefix_caching else None
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._drafters: dict[Job, Drafter] = {}
        self._reading: Reading[Job] | None = None
        self._new_loop()
        tenants.rows = lambda: len(self._loop)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _new_loop(self) -> None:
        target, decoding = self._target, self._decoding
        self._loop = Loop[Job](
            target,
            target.allocate(decoding.batch_size),
            max_new_tokens=decoding.max_new_tokens,
            prefixes=self.prefixes,
        )
        self._running: dict[Job, Request[Job]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running) + (self._reading is not None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; raise OverloadError if too many wait."""
        with self._changed:
            if len(self._waiting) + len(jobs) > self._most_waiting:
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            if len(self._waiting) + len(jobs) > self._most_waiting or self._is_stopping:
                raise OverloadError("the server has as many requests as it accepts: ask again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def stop(self) -> None:
        """End all answers and the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._waiting or self.running)
                if self._is_stopping:
                    break
            try:
                self._advance()
            except Exception as error:  # a fault of the engine ends the running answers, not the server
                traceback.print_exc(file=sys.stderr)
                self._fail(error)
        self._fail(OverloadError("the server is shutting down: ask another one, or later"))

    def _advance(self) -> None:
        """One piece of a prompt, and one step of all running answers."""
        self._drop_cancelled()
        if self._reading is None and not self._loop.is_full:
            self._start_next()
        if self._reading is not None and self._reading.read(PIECE_BESIDE if len(self._loop) else PIECE_ALONE):
            reading, self._reading = self._reading, None
            self._running[reading.request.key] = reading.request
            self._hand_out(self._loop.join(reading))
        if len(self._loop):
            for outcome in self._loop.step():
                self._hand_out(outcome)

    def _start_next(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            if job.is_cancelled:
                continue
            try:
                drafter = self._drafters[job] = self._tenants.take(job.tenant)
            except Exception as error:  # no drafter could be made, which concerns no other answer
                traceback.print_exc(file=sys.stderr)
                job.deliver(_told(error))
                continue
            try:
                self._reading = self._loop.start(job.request(job, drafter))
                return
            except HdtoolError as error:
                self._finish(job)
                job.deliver(error)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.is_cancelled]:
            self._loop.remove(self._running[job])
            self._finish(job)
        if self._reading is not None:
            job = self._reading.request.key
            if job.is_cancelled:
                self._reading.end()
                self._reading = None
                self._finish(job)

    def _hand_out(self, outcome: Outcome[Job]) -> None:
        request, step = outcome
        if isinstance(step, HdtoolError) or step.finish:
            self._finish(request.key)
        request.key.deliver(step)

    def _finish(self, job: Job) -> None:
        self._running.pop(job, None)
        if drafter := self._drafters.pop(job, None):
            self._tenants.put(job.tenant, drafter)

    def _fail(self, error: Exception) -> None:
        """End all answers with an error; those that wait stay unless the engine stops."""
        jobs = list(self._drafters)
        self._reading = None
        try:
            self._loop.end()
        finally:
            self._drafters.clear()  # the drafters may be in any state: new ones are made
            self._new_loop()
        if self._is_stopping:
            with self._changed:
                jobs += self._waiting
                self._waiting.clear()
        for job in jobs:
            job.deliver(_told(error))


def _told(error: Exception) -> HdtoolError | EngineError:
    return error if isinstance(error, HdtoolError) else EngineError(str(error))
