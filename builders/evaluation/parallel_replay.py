"""Runs replays in several processes.

A job replays one method on one part of the conversations. Parts have a fixed size and start with a fresh drafter, so
results do not depend on the number of processes. If the method has a history, a replay of a conversation depends on
the conversations before it, so a single job replays all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from threading import current_thread, main_thread
from traceback import format_exc
from typing import Any

import torch

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, replay_method
from hdtool.data.errors import HdtoolError
from hdtool.data.isolated_processes import isolated_children
from hdtool.data.progress import ProgressBar, progress_bar
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.settings.decoding import TAKE_HISTORY
from hdtool.runtime.stores.store_set import StoreSet

CONVERSATIONS_PER_JOB = 128
MIN_TOKENS_FOR_WORKERS = 250_000
"""Total number of tokens below which starting processes takes longer than the replay."""

TURN_DONE = None
"""Message of a worker that has replayed a turn."""

RecordedConversation = Sequence[RecordedTurn]


@dataclass(frozen=True)
class ReplayJob:
    contender: ReplayMethod
    turns: list[RecordedTurn]
    warm: list[RecordedTurn]
    """Turns replayed first and not counted."""

    def play(self, store_set: StoreSet, on_turn: Callable[[], None]) -> ReplayResult:
        return replay_method(self.contender, self.turns, store_set, on_turn, self.warm)


def replay(
    contenders: Sequence[ReplayMethod],
    conversations: Sequence[RecordedConversation],
    store_set: StoreSet,
    *,
    workers: int | None = None,
    warm: Sequence[RecordedConversation] = (),
) -> dict[str, ReplayResult]:
    """Return each contender's result of replaying all conversations; show a progress bar of their turns.

    Methods that take a history first replay ``warm`` conversations, which are left out of the results. By default,
    ``workers`` is the number of cores if the replay has more than ``MIN_TOKENS_FOR_WORKERS`` tokens, else 1.
    """
    jobs = _jobs(contenders, conversations, warm)
    for contender in contenders:  # compile the kernels once, and fail early if a store is missing
        drafter_with_budget(contender.budget, contender.config, store_set)
    if workers is None:
        tokens = sum(len(turn.answer) for job in jobs for turn in (*job.warm, *job.turns))
        workers = (os.cpu_count() or 1) if tokens > MIN_TOKENS_FOR_WORKERS else 1
    processes = min(len(jobs), workers)
    turns = sum(len(job.turns) + len(job.warm) for job in jobs)
    with progress_bar(turns, "replay", unit="turns") as progress:
        if processes == 1:
            done = [job.play(store_set, progress.advance) for job in jobs]
        else:
            done = _in_processes(jobs, store_set, processes, progress)
    names = [contender.name for contender in contenders]
    return {name: ReplayResult.joined([part for part in done if part.method == name]) for name in names}


def _jobs(
    contenders: Sequence[ReplayMethod],
    conversations: Sequence[RecordedConversation],
    warm: Sequence[RecordedConversation],
) -> list[ReplayJob]:
    jobs = []
    for contender in contenders:
        size = len(conversations) if contender.config.has_history else CONVERSATIONS_PER_JOB
        # Methods without a history keep nothing between conversations, so warming them has no effect.
        before = warm if contender.config.method in TAKE_HISTORY else ()
        for start in range(0, len(conversations), max(1, size)):
            part = conversations[start : start + size]
            jobs.append(ReplayJob(contender, list(chain.from_iterable(part)), list(chain.from_iterable(before))))
    return jobs


def _in_processes(
    jobs: Sequence[ReplayJob], store_set: StoreSet, processes: int, progress: ProgressBar
) -> list[ReplayResult]:
    results: dict[int, ReplayResult] = {}
    left = iter(enumerate(jobs))
    busy: dict[Connection, int] = {}
    try:
        with ExitStack() as started:
            workers = [started.enter_context(_worker(store_set)) for _ in range(processes)]
            for worker, (number, job) in zip(workers, left, strict=False):
                busy[worker] = number
                worker.send(job)
            while busy:
                ready: list[Any] = wait(busy)
                for worker in ready:
                    message = worker.recv()
                    if message is TURN_DONE:
                        progress.advance()
                        continue
                    if isinstance(message, Exception):
                        raise message
                    results[busy.pop(worker)] = message
                    if following := next(left, None):
                        busy[worker], job = following
                        worker.send(job)
    except (EOFError, ConnectionError):
        raise HdtoolError(
            "a process of the replay was ended from outside, as happens where memory is short: try --workers 1"
        ) from None
    return [results[number] for number in range(len(jobs))]


@contextmanager
def _worker(store_set: StoreSet) -> Iterator[Connection]:
    """Start a process that plays jobs, and yield the connection to it; end the process after the ``with`` block."""
    context = get_context("spawn")  # a fork would inherit locked mutexes of torch's threads
    connection, of_worker = context.Pipe()
    process = context.Process(target=_play_jobs, args=(of_worker, store_set), daemon=True)
    with isolated_children(), _sigint_ignored():
        process.start()
    of_worker.close()  # so that the end of the process ends the connection
    try:
        yield connection
    finally:
        process.terminate()
        process.join()


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Make processes started in the ``with`` block ignore Ctrl-C; outside the main thread, do nothing."""
    if current_thread() is not main_thread():  # other threads cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _play_jobs(connection: Connection, store_set: StoreSet) -> None:
    """Send the result of each received job, or its error, and ``TURN_DONE`` after each turn; end with the parent."""
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        while True:
            job: ReplayJob = connection.recv()
            try:
                result: ReplayResult | Exception = job.play(store_set, lambda: connection.send(TURN_DONE))
            except Exception as error:
                error.add_note(format_exc())
                result = error
            connection.send(result)
