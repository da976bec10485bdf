"""Runs replays in several processes.

A job replays one method on one part of the conversations. Parts have a fixed size and start with a fresh drafter, so
results do not depend on the number of processes. If the method has a history, a replay of a conversation depends on
the conversations before it, so a single job replays all of them. Worker processes read their jobs from files: only
paths go through the pool's queue, because a large item in it can block the exit of Python 3.11.4 and older.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch

from hdtool.builders.evaluation.job_files import job_files
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, replay_method
from hdtool.data.errors import HdtoolError
from hdtool.data.isolated_processes import isolated_children
from hdtool.data.progress import ProgressBar, progress_bar
from hdtool.runtime.config.decoding import TAKE_HISTORY
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.stores.store_set import StoreSet

CONVERSATIONS_PER_JOB = 128
MIN_TOKENS_FOR_WORKERS = 250_000
"""Total number of tokens below which starting processes takes longer than the replay."""
POLL_SECONDS = 0.1

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
    title: str = "replay",
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
    with progress_bar(turns, title, unit="turns") as progress:
        if processes == 1:
            done = [job.play(store_set, progress.advance) for job in jobs]
        else:
            with job_files(jobs) as files:
                done = _in_processes(files, store_set, processes, progress)
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


@isolated_children()
def _in_processes(
    jobs: Sequence[Path], store_set: StoreSet, processes: int, progress: ProgressBar
) -> list[ReplayResult]:
    context = get_context("spawn")  # a fork would inherit locked mutexes of torch's threads
    turns_done = context.Value("q", 0)
    other_children = set(active_children())
    pool = ProcessPoolExecutor(processes, context, _start_worker, (store_set, turns_done))
    try:
        with _sigint_ignored():
            futures = [pool.submit(_run, job) for job in jobs]
        pending: set[Future[ReplayResult]] = set(futures)
        while pending:
            done, pending = wait(pending, POLL_SECONDS)
            for future in done:
                future.result()  # raises the error of a failed job
            progress.to(turns_done.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise HdtoolError(
            "a process of the replay was ended from outside, as happens where memory is short: try --workers 1"
        ) from None
    except BaseException:
        for process in set(active_children()) - other_children:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}
"""Stores and shared turn counter of a worker process."""


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Make processes started in the ``with`` block ignore Ctrl-C; the parent handles it and terminates them."""
    if current_thread() is not main_thread():  # other threads cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(store_set: StoreSet, turns_done: Any) -> None:
    torch.set_num_threads(1)
    _worker.update(store_set=store_set, turns_done=turns_done)


def _run(file: Path) -> ReplayResult:
    job: ReplayJob = pickle.loads(file.read_bytes())
    return job.play(_worker["store_set"], _count_turn)


def _count_turn() -> None:
    with _worker["turns_done"].get_lock():
        _worker["turns_done"].value += 1
