"""A crew of processes that shares the work of a replay.

A job is one contender on one part of the conversations. Parts are of a fixed size and each starts with a
fresh drafter, so what comes out does not depend on how many processes there are.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from typing import Any

import torch

from hdtool.data.errors import HdtoolError
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay import Contender, play
from hdtool.runtime.evaluation.replay_results import Played
from hdtool.runtime.stores.store_set import StoreSet

PART = 128
"""Conversations that one drafter lives through."""
WORTH_A_CREW = 250_000
"""Tokens to be played, over all contenders, that take longer than processes take to start."""
LOOK_EVERY = 0.1
"""Seconds."""

Conversation = Sequence[RecordedTurn]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    contender: Contender
    turns: list[RecordedTurn]


def replay(
    contenders: Sequence[Contender],
    conversations: Sequence[Conversation],
    store_set: StoreSet,
    *,
    workers: int | None = None,
    told: Advance | None = None,
) -> dict[str, Played]:
    """Every contender on all conversations; ``told`` hears how many turns have been played by now."""
    starts = range(0, len(conversations), PART)
    parts = [list(chain.from_iterable(conversations[start : start + PART])) for start in starts]
    jobs = [Job(contender, part) for contender in contenders for part in parts]
    for contender in contenders:  # what has to be compiled is compiled once, and what is lacking said here
        drafter_within(contender.budget, contender.config, store_set)
    count = min(len(jobs), _worthwhile(jobs) if workers is None else workers)
    done = _alone(jobs, store_set, told) if count == 1 else _together(jobs, store_set, count, told)
    names = [contender.name for contender in contenders]
    return {name: Played.joined([part for part in done if part.method == name]) for name in names}


def _worthwhile(jobs: Sequence[Job]) -> int:
    work = sum(len(turn.answer) for job in jobs for turn in job.turns)
    return (os.cpu_count() or 1) if work > WORTH_A_CREW else 1


def _alone(jobs: Sequence[Job], store_set: StoreSet, told: Advance | None) -> list[Played]:
    count = 0

    def hear() -> None:
        nonlocal count
        count += 1
        if told:
            told(count)

    return [play(job.contender, job.turns, store_set, hear) for job in jobs]


def _together(jobs: Sequence[Job], store_set: StoreSet, count: int, told: Advance | None) -> list[Played]:
    context = get_context("spawn")  # a fork would copy the locks of torch's threads
    played = context.Value("q", 0)
    others = set(active_children())
    pool = ProcessPoolExecutor(count, context, _join, (store_set, played))
    try:
        with _deaf():
            futures = [pool.submit(_work, job) for job in jobs]
        left: set[Future[Played]] = set(futures)
        while left:
            done, left = wait(left, LOOK_EVERY)
            for future in done:
                future.result()  # what failed, fails here
            if told:
                told(played.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise HdtoolError(
            "a process of the replay was ended from outside, as happens where memory is short: try --workers 1"
        ) from None
    except BaseException:
        for process in set(active_children()) - others:
            process.terminate()  # nobody waits for its work any more
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}
"""What a process of the crew was given."""


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started in here do not hear Ctrl-C, from their first moment on: it is for the one who waits."""
    if current_thread() is not main_thread():  # where signals cannot be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _join(store_set: StoreSet, played: Any) -> None:
    torch.set_num_threads(1)
    _worker.update(store_set=store_set, played=played)


def _work(job: Job) -> Played:
    return play(job.contender, job.turns, _worker["shelf"], _hear)


def _hear() -> None:
    with _worker["played"].get_lock():
        _worker["played"].value += 1
