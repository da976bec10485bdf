"""Chooses torch's number of CPU threads.

Compiled passes give the same bits with any number of threads, so the fastest is measured: on a busy machine, or if
memory is the bottleneck, fewer can be faster. In the library's code the number can change the order of a sum, so there
it depends on the machine only.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

import torch

from hdtool.data.kept_records import MAX_CACHE_AGE, CachedValue
from hdtool.runtime.model.checks.trees import some_context
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree

NODES = (0, 15)
"""Sizes of the trees that are timed."""
REPEATS, PATIENCE = 3, 0.02
"""Repetitions after a warm-up pass, and the seconds after which they stop."""
MIN_SPEEDUP = 1.03
"""Twice as many threads are used only if they are faster by this factor."""
CGROUPS = Path("/sys/fs/cgroup")


def choose_threads(target: Target, wanted: int | None = None, record: CachedValue | None = None) -> int:
    """Set the number of threads to ``wanted``, or choose one up to torch's current number; return it.

    Compiled passes are timed with all threads, with half, and so on, until fewer are slower. With a ``record``,
    processes of the next 24 hours use the same number. Other models use the CPUs that a container may use.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif target.device.type == "cpu" and (max_threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(
            _fastest(target, max_threads, record) if target.compiled else min(max_threads, cpu_quota() or max_threads)
        )
    return torch.get_num_threads()


def cpu_quota(root: Path = CGROUPS) -> int | None:
    """The CPUs whose time a container may use, rounded up; None without a limit. torch does not know it."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()
            return None if quota in ("max", "-1") else max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def _fastest(target: Target, max_threads: int, record: CachedValue | None) -> int:
    threads = record.read(int, max_age=MAX_CACHE_AGE) if record else None
    if threads is None or not 1 <= threads <= max_threads:
        threads = _measured(target, max_threads)
        if record:
            record.write(threads)
    return threads


def _measured(target: Target, best: int) -> int:
    shortest = _seconds_with(best, target)
    while best > 1 and (seconds := _seconds_with(best // 2, target)) <= MIN_SPEEDUP * shortest:
        best, shortest = best // 2, min(shortest, seconds)
    return best


def _seconds_with(threads: int, target: Target) -> float:
    """Mean seconds of one pass of each size, slow passes of a busy machine included."""
    torch.set_num_threads(threads)
    cache = target.allocate()
    target.prefill(cache, 0, some_context(4, target.config.vocab_size), room=max(NODES))
    trees = [DraftTree.of(0, [1] * size, [-1] * size if target.takes_trees else range(-1, size - 1)) for size in NODES]
    seconds: list[float] = []
    began = time.perf_counter()
    for repeat in range(REPEATS + 1):
        before = target.log.seconds
        for tree in trees:
            target.verify(cache, [tree])
            target.wait()
        seconds.append(target.log.seconds - before)
        if repeat and time.perf_counter() - began > PATIENCE:
            break
    return fmean(seconds[1:])
