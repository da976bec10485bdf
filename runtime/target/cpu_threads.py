"""Chooses the number of CPU threads.

Compiled passes are timed: on a busy machine, or if memory bandwidth is the bottleneck, fewer threads can be faster, and
any number gives bitwise equal results. In transformers' code, the number of threads can change the order of a sum, so
without compiled passes the number depends only on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

from hdtool.data.durable_files import MAX_CACHE_AGE, CachedValue
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.kernels.compile_process import DRAFTER, is_compiling
from hdtool.runtime.target.target import Target

NODES = (0, 15)
"""Sizes, in nodes, of the trees that are timed to choose the number of threads."""
REPEATS, PATIENCE = 3, 0.02
"""Maximum number of timed repetitions, and the time in seconds after which no further one starts."""
MIN_SPEEDUP = 1.03
"""Minimum speedup for which twice as many threads are used."""
CGROUPS = Path("/sys/fs/cgroup")


def choose_threads(target: Target, wanted: int | None = None, record: CachedValue | None = None) -> int:
    """Set torch's thread count to ``wanted`` or, if None, choose it automatically without raising it; return the count.

    On a CPU, compiled passes are timed with all threads, half of them, and so on, until fewer are slower; with a
    ``record``, processes reuse the result for 24 hours. While another process compiles the drafter, all threads but one
    are used instead. Without compiled passes, the container's CPU quota limits the number of threads.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif target.device.type == "cpu" and (max_threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(
            _fastest(target, max_threads, record) if target.compiled else min(max_threads, cpu_quota() or max_threads)
        )
    return torch.get_num_threads()


def cpu_quota(root: Path = CGROUPS) -> int | None:
    """Return the number of CPUs that a container may use, rounded up; None if unlimited or unknown."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()
            return None if quota in ("max", "-1") else max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def _fastest(target: Target, max_threads: int, record: CachedValue | None) -> int:
    if is_compiling(DRAFTER):
        return max_threads - 1
    threads = record.read(int, max_age=MAX_CACHE_AGE) if record else None
    if threads is None or not 1 <= threads <= max_threads:
        threads = fastest_threads(lambda count: _seconds_with(count, target), max_threads)
        if record:
            record.write(threads)
    return threads


def fastest_threads(seconds_with: Callable[[int], float], best: int) -> int:
    """Return the number of threads, at most ``best``, for which ``seconds_with`` returns the least time, or nearly so.

    The number is halved until fewer threads are slower.
    """
    shortest = seconds_with(best)
    while best > 1 and (seconds := seconds_with(best // 2)) <= MIN_SPEEDUP * shortest:
        best, shortest = best // 2, min(shortest, seconds)
    return best


def _seconds_with(threads: int, target: Target) -> float:
    """Return the time in seconds of one pass for each tree size in ``NODES``, in total, with this many threads."""
    torch.set_num_threads(threads)
    cache = target.allocate()
    target.prefill(cache, 0, some_context(4, target.config.vocab_size), room=max(NODES))
    trees = [DraftTree.of(0, [1] * size, [-1] * size if target.takes_trees else range(-1, size - 1)) for size in NODES]

    def run() -> float:
        before = target.log.seconds
        for tree in trees:
            target.verify(cache, [tree])
        return target.log.seconds - before

    return mean_seconds(run)


def mean_seconds(run: Callable[[], float]) -> float:
    """Return the mean of the times in seconds that ``run`` returns, called up to ``REPEATS`` times after a warm-up."""
    seconds: list[float] = []
    began = time.perf_counter()
    for repeat in range(REPEATS + 1):
        seconds.append(run())
        if repeat and time.perf_counter() - began > PATIENCE:
            break
    return fmean(seconds[1:])
