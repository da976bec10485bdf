"""Threads that compute the parts of a product or of attention together while a pass runs in compiled code.

A thread that waits for work between two of these does so in compiled code, by reading a word of memory: a pass has
hundreds of them, each of which takes less time than it takes to wake a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import WORD_SIZE, array_at, compiled, generated
from hdtool.runtime.kernels.gemm import ARGUMENTS, call_at
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, PAUSE, VectorCode

WORK = 0
"""The number of the job in the upper bits, and the parts of it that nobody has taken in the lower ones."""
COMPLETED = CACHE_LINE // WORD_SIZE
"""Parts of the job that are computed, in a cache line of its own."""
JOB = 2 * CACHE_LINE // WORD_SIZE
"""The address of the function and its arguments but for the units of a part, which come last; then the number of units,
what the first unit of a part is a multiple of, and the number of parts."""
FIELDS = JOB + ARGUMENTS + 2
MOST_PARTS = 1 << 16
CLOSED = -1
PARTS_OF_A_THREAD = 2
"""More of them balance threads of which one was interrupted, and take longer to give out."""
LEAST_NUMBERS = 1 << 16
"""Weights of a product from which on it is shared."""
MULTIPLE = 16
"""Matrix rows of a part are a multiple of it: those of whole panels and tiles."""


@generated(types.int64, returns=types.int64)
def load(builder: Any, address: Any) -> Any:
    """What another thread stored last, and all that it stored before."""
    return builder.load_atomic(builder.inttoptr(address, INDEX.as_pointer()), "acquire", WORD_SIZE)


@generated(types.int64, types.int64)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store a number after all that was stored before."""
    builder.store_atomic(value, builder.inttoptr(address, INDEX.as_pointer()), "release", WORD_SIZE)


@generated(types.int64)
def increase(builder: Any, address: Any) -> None:
    builder.atomic_rmw("add", builder.inttoptr(address, INDEX.as_pointer()), INDEX(1), "acq_rel")


@generated(types.int64, types.int64, types.int64, returns=types.boolean)
def replace(builder: Any, address: Any, old: Any, new: Any) -> Any:
    """Store a number if nobody has changed the old one."""
    pair = builder.cmpxchg(builder.inttoptr(address, INDEX.as_pointer()), old, new, "acq_rel", "acquire")
    return builder.extract_value(pair, 1)


@generated()
def pause(builder: Any) -> None:
    """Let the other thread of a processor core run for a moment."""
    if PAUSE:
        VectorCode(builder).call(PAUSE, ir.VoidType())


@compiled
def _take_part(control: int) -> bool:
    """Compute one part of the job, if there is one left."""
    word = load(control + WORK * WORD_SIZE)
    if word == CLOSED or word % MOST_PARTS == 0 or not replace(control + WORK * WORD_SIZE, word, word - 1):
        return False
    # The job stays as it is until this part is completed.
    job = array_at(control + JOB * WORD_SIZE, (FIELDS - JOB,), types.int64)
    function, one, two, three, four, five, six, seven, units, multiple, parts = job
    part = word % MOST_PARTS - 1
    first = units * part // parts // multiple * multiple
    end = units if part == parts - 1 else units * (part + 1) // parts // multiple * multiple
    call_at(function, one, two, three, four, five, six, seven, first, end)
    increase(control + COMPLETED * WORD_SIZE)
    return True


@compiled
def _work(control: int) -> None:
    """Compute parts of jobs until the team is closed."""
    while load(control + WORK * WORD_SIZE) != CLOSED:
        if not _take_part(control):
            pause()


@compiled
def parts_of(threads: int, units: int, multiple: int) -> int:
    """The parts of a job; without an open team, it is one."""
    return min(threads * PARTS_OF_A_THREAD, units // multiple)


@compiled
def compute_together(
    control: int,
    threads: int,
    function: int,
    one: int,
    two: int,
    three: int,
    four: int,
    five: int,
    six: int,
    seven: int,
    units: int,
    multiple: int,
) -> None:
    """Compute all units of a job with the other threads of an open team; address 0 is no team.

    The function at an address gets seven arguments, the first unit to compute, a multiple of ``multiple``, and the end.
    """
    parts = parts_of(threads, units, multiple)
    if control == 0 or parts < 2:
        if units:
            call_at(function, one, two, three, four, five, six, seven, 0, units)
        return
    job = array_at(control + JOB * WORD_SIZE, (FIELDS - JOB,), types.int64)
    job[0], job[1], job[2], job[3], job[4] = function, one, two, three, four
    job[5], job[6], job[7], job[8], job[9], job[10] = five, six, seven, units, multiple, parts
    store(control + COMPLETED * WORD_SIZE, 0)
    job_before = load(control + WORK * WORD_SIZE) // MOST_PARTS
    store(control + WORK * WORD_SIZE, (job_before + 1) * MOST_PARTS + parts)
    while _take_part(control):
        pass
    while load(control + COMPLETED * WORD_SIZE) < parts:
        if not _take_part(control):
            pause()


@compiled
def multiply_together(
    control: int,
    threads: int,
    product: int,
    matrix: int,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    bias: int,
) -> None:
    """Compute a product together."""
    team = control if outs * columns >= LEAST_NUMBERS else 0
    compute_together(team, threads, product, matrix, outs, columns, inputs, rows, outputs, bias, outs, MULTIPLE)


@compiled
def _open(control: int, job: int) -> None:
    store(control + WORK * WORD_SIZE, job * MOST_PARTS)


@compiled
def _close(control: int) -> int:
    """Close the team; the number of its last job."""
    job = load(control + WORK * WORD_SIZE) // MOST_PARTS
    store(control + WORK * WORD_SIZE, CLOSED)
    return job  # type: ignore[no-any-return]


ALONE: AbstractContextManager[int] = nullcontext(0)


class Team:
    """A number of threads, of which the one that computes a pass is the first.

    A process that was forked has none of the others: the first one computes all parts.
    """

    def __init__(self, threads: int) -> None:
        memory = np.zeros(FIELDS + CACHE_LINE // WORD_SIZE, np.int64)
        self._memory = memory
        self._control = -(-memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        self._job = _close(self._control)
        self._lock = threading.Lock()
        self._passes = [threading.Semaphore(0) for _ in range(threads - 1)]
        for number, passes in enumerate(self._passes):
            name = f"hdtool product {number + 1}"
            threading.Thread(target=self._serve, args=(passes,), name=name, daemon=True).start()

    def _serve(self, passes: threading.Semaphore) -> None:
        while True:
            passes.acquire()
            _work(self._control)

    def open(self) -> AbstractContextManager[int]:
        """The address for ``multiply_together``; 0 while another pass has the threads."""
        return self._opened() if self._passes else ALONE

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if not self._lock.acquire(blocking=False):
            yield 0
            return
        try:
            _open(self._control, self._job)
            for passes in self._passes:
                passes.release()
            try:
                yield self._control
            finally:
                self._job = _close(self._control)
        finally:
            self._lock.release()


@cache
def team_of(threads: int) -> Team:
    return Team(threads)
