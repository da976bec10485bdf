"""A thread pool that shares matmuls and attention among threads while a pass runs in compiled code.

Waiting threads spin on a word of memory: a pass has hundreds of jobs, each shorter than it takes to wake a thread.
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
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS, call_at
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, PAUSE, VectorCode

WORK = 0
"""Job number in the upper bits, parts nobody has taken in the lower ones."""
COMPLETED = CACHE_LINE // WORD_SIZE
"""Completed parts of the job, on a cache line of its own."""
JOB = 2 * CACHE_LINE // WORD_SIZE
"""Job record: function address and arguments except the part's units, which come last; then the number of units, the
multiple at which parts start, and the number of parts."""
CONTROL_FIELDS = JOB + MATMUL_ARGUMENTS + 2
MAX_PARTS = 1 << 16
CLOSED = -1
PARTS_PER_THREAD = 2
"""More parts balance load when a thread is interrupted, but take longer to hand out."""
MIN_PARALLEL_WEIGHTS = 1 << 16
"""Matmuls with fewer weights run on one thread."""
ROW_MULTIPLE = 16
"""Parts start at a multiple of this matrix row, for whole panels and tiles."""


@generated(types.int64, returns=types.int64)
def load(builder: Any, address: Any) -> Any:
    """Load with acquire ordering."""
    return builder.load_atomic(builder.inttoptr(address, INDEX.as_pointer()), "acquire", WORD_SIZE)


@generated(types.int64, types.int64)
def store(builder: Any, address: Any, value: Any) -> None:
    """Store with release ordering."""
    builder.store_atomic(value, builder.inttoptr(address, INDEX.as_pointer()), "release", WORD_SIZE)


@generated(types.int64)
def increment(builder: Any, address: Any) -> None:
    builder.atomic_rmw("add", builder.inttoptr(address, INDEX.as_pointer()), INDEX(1), "acq_rel")


@generated(types.int64, types.int64, types.int64, returns=types.boolean)
def compare_and_swap(builder: Any, address: Any, old: Any, new: Any) -> Any:
    """Store ``new`` if the word still holds ``old``."""
    pair = builder.cmpxchg(builder.inttoptr(address, INDEX.as_pointer()), old, new, "acq_rel", "acquire")
    return builder.extract_value(pair, 1)


@generated()
def pause(builder: Any) -> None:
    """Let the core's other hardware thread run for a moment."""
    if PAUSE:
        VectorCode(builder).call(PAUSE, ir.VoidType())


@compiled
def _take_part(control: int) -> bool:
    """Compute one part of the job, if one is left."""
    word = load(control + WORK * WORD_SIZE)
    if word == CLOSED or word % MAX_PARTS == 0 or not compare_and_swap(control + WORK * WORD_SIZE, word, word - 1):
        return False
    # The job can't change before this part is completed.
    job = array_at(control + JOB * WORD_SIZE, (CONTROL_FIELDS - JOB,), types.int64)
    function, one, two, three, four, five, six, seven, units, multiple, parts = job
    part = word % MAX_PARTS - 1
    first = units * part // parts // multiple * multiple
    end = units if part == parts - 1 else units * (part + 1) // parts // multiple * multiple
    call_at(function, one, two, three, four, five, six, seven, first, end)
    increment(control + COMPLETED * WORD_SIZE)
    return True


@compiled
def _work(control: int) -> None:
    """Compute parts of jobs until the pool closes."""
    while load(control + WORK * WORD_SIZE) != CLOSED:
        if not _take_part(control):
            pause()


@compiled
def parts_of(threads: int, units: int, multiple: int) -> int:
    """Parts of a job in an open pool."""
    return min(threads * PARTS_PER_THREAD, units // multiple)


@compiled
def run_parallel(
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
    """Run all units of a job on the threads of an open pool; with address 0, on this thread alone.

    The function gets seven arguments, the first unit to compute (a multiple of ``multiple``) and the end.
    """
    parts = parts_of(threads, units, multiple)
    if control == 0 or parts < 2:
        if units:
            call_at(function, one, two, three, four, five, six, seven, 0, units)
        return
    job = array_at(control + JOB * WORD_SIZE, (CONTROL_FIELDS - JOB,), types.int64)
    job[0], job[1], job[2], job[3], job[4] = function, one, two, three, four
    job[5], job[6], job[7], job[8], job[9], job[10] = five, six, seven, units, multiple, parts
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
    matmul: int,
    matrix: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    bias: int,
) -> None:
    """Multiply on the threads of an open pool, if the matrix is large enough."""
    thread_pool = control if out_features * columns >= MIN_PARALLEL_WEIGHTS else 0
    run_parallel(
        thread_pool,
        threads,
        matmul,
        matrix,
        out_features,
        columns,
        inputs,
        rows,
        outputs,
        bias,
        out_features,
        ROW_MULTIPLE,
    )


@compiled
def _open(control: int, job: int) -> None:
    store(control + WORK * WORD_SIZE, job * MAX_PARTS)


@compiled
def _close(control: int) -> int:
    """Close the pool; return the number of its last job."""
    job = load(control + WORK * WORD_SIZE) // MAX_PARTS
    store(control + WORK * WORD_SIZE, CLOSED)
    return job  # type: ignore[no-any-return]


NO_THREADS: AbstractContextManager[int] = nullcontext(0)


class ThreadPool:
    """Worker threads beside the one that computes a pass.

    A forked process has none of the workers: its own thread computes all parts.
    """

    def __init__(self, threads: int) -> None:
        memory = np.zeros(CONTROL_FIELDS + CACHE_LINE // WORD_SIZE, np.int64)
        self._memory = memory
        self._control = -(-memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        self._job = _close(self._control)
        self._lock = threading.Lock()
        self._wake_ups = [threading.Semaphore(0) for _ in range(threads - 1)]
        for number, passes in enumerate(self._wake_ups):
            name = f"hdtool product {number + 1}"
            threading.Thread(target=self._serve, args=(passes,), name=name, daemon=True).start()

    def _serve(self, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            _work(self._control)

    def open(self) -> AbstractContextManager[int]:
        """Open the pool and yield its address for ``parallel_matmul``; 0 while another pass holds it."""
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
