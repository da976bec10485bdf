"""The thread that decodes all requests in one batch, and the pools of tenants' drafters."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from hdtool.data.errors import HdtoolError
from hdtool.data.stores.tenant import Tenant
from hdtool.runtime.answering.answer_plan import AnswerPlan
from hdtool.runtime.core.cache_interface import AnyCache
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.prefix_cache import PrefixCache, common_prefix_length
from hdtool.runtime.core.request import Observer, Request
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.step import Step
from hdtool.runtime.drafters.drafter_factory import DrafterMaker
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.target import Target

SHUTTING_DOWN = "the server is shutting down: ask another one, or later"


class OverloadError(HdtoolError):
    """Raised if the server is overloaded or shutting down."""


class EngineError(Exception):
    """Delivered instead of a step if the engine failed; clients must not see its message."""


@dataclass(eq=False)
class AnswerJob:
    """An answer to generate, and the callback that gets its steps."""

    tenant: str
    plan: AnswerPlan
    deliver: Callable[[Step | Exception], None]
    """Called in the engine's thread with each step, or with the error that ends the answer."""
    prediction: Sequence[int] = ()
    observer: Observer | None = None
    drafts: bool = True
    """False to generate the answer without a drafter of the tenant."""
    is_cancelled: bool = False
    """Set to True by any thread to end the answer at the next step."""
    submitted: float = field(default_factory=time.monotonic)


class Tenants:
    """Holds each tenant's stores and pool of drafters; a drafter serves one answer at a time."""

    def __init__(self, loaded: Loaded, decoding: DecodeConfig, stores: StoresConfig, names: list[str]) -> None:
        self._decoding = decoding
        tenants = {name: Tenant.of_key(name, stores.namespace) for name in names}
        self.store_sets = {
            name: loaded.store_opener(stores, tenant).open_for(decoding) for name, tenant in tenants.items()
        }
        self._free_drafters: dict[str, list[tuple[Drafter, Sequence[int]]]] = {name: [] for name in names}
        """The free drafters of each tenant, each with its last prompt."""
        size = decoding.batch_size
        self._drafters = DrafterMaker(loaded.target, {min(size, 2**power) for power in range(size.bit_length() + 1)})
        for name in names:  # raises errors of stores here, and not in the first answer
            self.put(name, self._new_drafter(name))

    def take(self, tenant: str, prompt: Sequence[int] = ()) -> Drafter:
        """Take the free drafter whose last prompt shares the longest prefix with ``prompt``.

        Make a drafter if none is free.
        """
        free = self._free_drafters[tenant]
        if not free:
            return self._new_drafter(tenant)
        tokens = _as_array(prompt)
        shared = [common_prefix_length(last, tokens) for _, last in free]
        return free.pop(max(range(len(free)), key=lambda index: (shared[index], index)))[0]

    def put(self, tenant: str, drafter: Drafter, prompt: Sequence[int] = ()) -> None:
        """Put a drafter back into its tenant's pool at the end of its answer to ``prompt``."""
        self._free_drafters[tenant].append((drafter, _as_array(prompt)))

    def _new_drafter(self, tenant: str) -> Drafter:
        return self._drafters.make(self._decoding, self.store_sets[tenant])


def _as_array(tokens: Sequence[int]) -> Sequence[int]:
    """Return tokens as an array, which is compared faster than a list."""
    return cast(Sequence[int], np.array(tokens, np.int64))


class EngineThread:
    """Runs jobs as a batch in one thread, and starts them in the order of submission."""

    def __init__(
        self, target: Target, tenants: Tenants, decoding: DecodeConfig, *, max_waiting: int, prefix_bytes: int
    ) -> None:
        self._target, self._tenants, self._decoding = target, tenants, decoding
        self._max_waiting = max_waiting
        self.prefixes = PrefixCache(prefix_bytes) if prefix_bytes and decoding.prefix_caching else None
        self._waiting: deque[AnswerJob] = deque()
        self._condition = threading.Condition()
        self._is_stopping = False
        self._running: dict[AnswerJob, tuple[Drafter, Request[AnswerJob]]] = {}
        """Jobs in the session, each with its tenant's drafter and its request."""
        self._begin_session()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _begin_session(self) -> None:
        cache = self._target.allocate(self._decoding.batch_size)
        self._target.prepare(cache)
        self._cache: AnyCache | None = cache
        self._session = Session[AnswerJob](self._target, cache, prefixes=self.prefixes, in_pieces=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def max_running(self) -> int:
        return self._decoding.batch_size

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the KV caches of all batch slots, idle or in use."""
        return sum(slot.valid for slot in cache.slots) if (cache := self._cache) else 0

    def stores(self, tenant: str) -> StoreSet:
        return self._tenants.store_sets[tenant]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[AnswerJob]) -> None:
        """Queue the jobs of a request; raise OverloadError if too many would wait, or if the server is stopping."""
        with self._condition:
            if len(self._waiting) + len(jobs) > self._max_waiting:
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            if self._is_stopping:
                raise OverloadError(SHUTTING_DOWN)
            if len(self._waiting) + len(jobs) > self._max_waiting:
                raise OverloadError("the server has as many requests as it accepts: ask again later")
            self._waiting.extend(jobs)
            self._condition.notify()

    def stop(self) -> None:
        """End all answers with an error, including waiting ones, and wait for the thread to end."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        error: Exception = OverloadError(SHUTTING_DOWN)
        try:
            self._advance_until_stopped()
            self._end_session(error)
        except Exception as fault:  # no session can be begun, as after most CUDA errors
            traceback.print_exc(file=sys.stderr)
            error = fault
        with self._condition:
            self._is_stopping = True
            waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            job.deliver(_public_error(error))

    def _advance_until_stopped(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_stopping or self._waiting or self.running)
                if self._is_stopping:
                    return
            try:
                self._advance()
                continue
            except Exception as error:  # an engine error ends the running answers, not the server
                traceback.print_exc(file=sys.stderr)
                self._end_session(error)
            self._begin_session()  # here, since the error refers to the old cache, and there may be no room for two

    def _advance(self) -> None:
        """Prefill the next piece of a prompt, or run one step for all running answers."""
        for job in [job for job in self._running if job.is_cancelled]:
            self._session.cancel(self._running[job][1])
            self._finish(job)
        if self._session.takes_next:
            self._start_next()
        for request, outcome in self._session.advance():
            if isinstance(outcome, HdtoolError) or outcome.finish:
                self._finish(request.key)
            request.key.deliver(outcome)

    def _start_next(self) -> None:
        """Submit the first waiting job to the session, unless the job is cancelled or no drafter can be made for it."""
        with self._condition:
            if not self._waiting:
                return
            job = self._waiting.popleft()
        if job.is_cancelled:
            return
        try:
            drafter = self._tenants.take(job.tenant, job.plan.prompt) if job.drafts else NoDraft()
        except Exception as error:  # failing to make a drafter must not end other answers
            traceback.print_exc(file=sys.stderr)
            job.deliver(_public_error(error))
            return
        limit = self._decoding.draft_tokens
        request = job.plan.request(
            job, drafter, job.prediction, draft_tokens=limit, owner=job.tenant, observer=job.observer
        )
        self._running[job] = drafter, request
        self._session.submit(request)

    def _finish(self, job: AnswerJob) -> None:
        drafter, _ = self._running.pop(job)
        if job.drafts:
            self._tenants.put(job.tenant, drafter, job.plan.prompt)

    def _end_session(self, error: Exception) -> None:
        """End all running answers with an error and free the cache; raise an exception if the session cannot end."""
        for job in self._running:
            job.deliver(_public_error(error))
        self._running.clear()  # the drafters may be in any state, so new ones are made
        self._session.end()
        self._cache = None
        del self._session


def _public_error(error: Exception) -> HdtoolError | EngineError:
    """Return the error that clients get, without the traceback, whose frames refer to the session's cache."""
    return error.with_traceback(None) if isinstance(error, HdtoolError) else EngineError(str(error))
