"""Thread pool for matmuls and attention in compiled passes.

While the pool is open, idle threads spin, because a pass runs hundreds of jobs that are shorter than a wake-up.
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

from hdtool.runtime.kernels.compiled import WORD_SIZE, array_at, compiled, generated, struct_at
from hdtool.runtime.kernels.matmul import KERNELS, MATMUL_ARGUMENTS, call_at
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, PAUSE, VectorCode

WORK = 0
"""Field with the job number in the upper bits and the number of parts not yet taken in the lower, or ``CLOSED``."""
COMPLETED = CACHE_LINE // WORD_SIZE
"""Field with the number of completed parts, on a separate cache line."""
JOB = 2 * CACHE_LINE // WORD_SIZE
"""First field of the job: function, eight arguments, units, multiple at which parts start, and number of parts."""
CONTROL_FIELDS = JOB + MATMUL_ARGUMENTS + 2
MAX_PARTS = 1 << 16
CLOSED = -1
PARTS_PER_THREAD = 2
"""Parts of a job per thread; more parts balance the load if a thread is interrupted, but add overhead."""
MIN_PARALLEL_WEIGHTS = 1 << 16
"""Matmuls with fewer weights run on the calling thread only."""
ROW_MULTIPLE = 16
"""Parts start at a multiple of this many matrix rows, so that they consist of whole panels and tiles."""


@generated(types.int64, returns=types.int64)
def load(builder: Any, address: Any) -> Any:
    """Load a 64-bit integer with acquire ordering."""
    return builder.load_atomic(builder.inttoptr(address, INDEX.as_pointer()), "acquire", WORD_SIZE)


@generated(types.int64, types.int64)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store a 64-bit integer with release ordering."""
    builder.store_atomic(value, builder.inttoptr(address, INDEX.as_pointer()), "release", WORD_SIZE)


@generated(types.int64)
def increment(builder: Any, address: Any) -> None:
    builder.atomic_rmw("add", builder.inttoptr(address, INDEX.as_pointer()), INDEX(1), "acq_rel")


@generated(types.int64, types.int64, types.int64, returns=types.boolean)
def compare_and_swap(builder: Any, address: Any, old: Any, new: Any) -> Any:
    """If the word at ``address`` still holds ``old``, store ``new`` and return True; otherwise return False."""
    pair = builder.cmpxchg(builder.inttoptr(address, INDEX.as_pointer()), old, new, "acq_rel", "acquire")
    return builder.extract_value(pair, 1)


@generated()
def pause(builder: Any) -> None:
    """Hint to the CPU that the thread is spinning, so that the core's other hardware thread can run."""
    if PAUSE:
        VectorCode(builder).call(PAUSE, ir.VoidType())


@compiled
def _take_part(control: int) -> bool:
    """Try to take a part of the current job and compute it; return False if no part was taken."""
    word = load(control + WORK * WORD_SIZE)
    if word == CLOSED or word % MAX_PARTS == 0 or not compare_and_swap(control + WORK * WORD_SIZE, word, word - 1):
        return False
    # The job can't change until this part is completed.
    job = array_at(control + JOB * WORD_SIZE, (CONTROL_FIELDS - JOB,), types.int64)
    function, one, two, three, four, five, six, seven, eight, units, multiple, parts = job
    part = word % MAX_PARTS - 1
    first = units * part // parts // multiple * multiple
    end = units if part == parts - 1 else units * (part + 1) // parts // multiple * multiple
    call_at(function, (one, two, three, four, five, six, seven, eight, first, end))
    increment(control + COMPLETED * WORD_SIZE)
    return True


@compiled
def _work(control: int) -> None:
    """Compute parts of jobs until the pool is closed."""
    while load(control + WORK * WORD_SIZE) != CLOSED:
        if not _take_part(control):
            pause()


@compiled
def parts_of(threads: int, units: int, multiple: int) -> int:
    """Return the number of parts into which a job of ``units`` units is split."""
    return min(threads * PARTS_PER_THREAD, units // multiple)


@compiled
def run_parallel(
    control: int, threads: int, function: int, arguments: tuple[int, ...], units: int, multiple: int
) -> None:
    """Run a job on the threads of the open pool at ``control``; if ``control`` is 0, use only the calling thread.

    The function at address ``function`` is called with the eight ``arguments`` and a range of units, which starts at a
    multiple of ``multiple``. Return once all units are done.
    """
    parts = parts_of(threads, units, multiple)
    if control == 0 or parts < 2:
        if units:
            call_at(function, (*arguments, 0, units))
        return
    job = array_at(control + JOB * WORD_SIZE, (CONTROL_FIELDS - JOB,), types.int64)
    job[0], job[-3], job[-2], job[-1] = function, units, multiple, parts
    for place in range(len(arguments)):
        job[1 + place] = arguments[place]
    store(control + COMPLETED * WORD_SIZE, 0)
    job_before = load(control + WORK * WORD_SIZE) // MAX_PARTS
    store(control + WORK * WORD_SIZE, (job_before + 1) * MAX_PARTS + parts)
    while _take_part(control):
        pass
    while load(control + COMPLETED * WORD_SIZE) < parts:
        if not _take_part(control):
            pause()


@compiled
def parallel_matmul(
    control: int,
    threads: int,
    kernels: int,
    matrix: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    bias: int,
) -> None:
    """Multiply on the threads of an open pool; small matrices use only the calling thread.

    ``kernels`` is the address of a record of ``KERNELS``.
    """
    thread_pool = control if out_features * columns >= MIN_PARALLEL_WEIGHTS else 0
    arguments = kernels, matrix, out_features, columns, inputs, rows, outputs, bias
    function = struct_at(kernels, KERNELS).multiply
    run_parallel(thread_pool, threads, function, arguments, out_features, ROW_MULTIPLE)


@compiled
def _open(control: int, job: int) -> None:
    store(control + WORK * WORD_SIZE, job * MAX_PARTS)


@compiled
def _close(control: int) -> int:
    """Close the pool and return the number of its last job."""
    job = load(control + WORK * WORD_SIZE) // MAX_PARTS
    store(control + WORK * WORD_SIZE, CLOSED)
    return job  # type: ignore[no-any-return]


NO_THREADS: AbstractContextManager[int] = nullcontext(0)


class ThreadPool:
    """Worker threads that help the thread that runs a pass.

    After a fork, the child has no workers and its thread computes all parts.
    """

    def __init__(self, threads: int) -> None:
        memory = np.zeros(CONTROL_FIELDS + CACHE_LINE // WORD_SIZE, np.int64)
        self._memory = memory
        self._control = -(-memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        self._job = _close(self._control)
        self._lock = threading.Lock()
        self._wake_ups = [threading.Semaphore(0) for _ in range(threads - 1)]
        for number, passes in enumerate(self._wake_ups):
            name = f"hdtool matmul {number + 1}"
            threading.Thread(target=self._serve, args=(passes,), name=name, daemon=True).start()

    def _serve(self, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            _work(self._control)

    def open(self) -> AbstractContextManager[int]:
        """Return a context manager that yields the open pool's address, or 0 if it has no workers or is in use."""
        return self._opened() if self._wake_ups else NO_THREADS

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if not self._lock.acquire(blocking=False):
            yield 0
            return
        try:
            _open(self._control, self._job)
            for wake in self._wake_ups:
                wake.release()
            try:
                yield self._control
            finally:
                self._job = _close(self._control)
        finally:
            self._lock.release()


@cache
def shared_thread_pool(threads: int) -> ThreadPool:
    return ThreadPool(threads)
