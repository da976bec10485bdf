"""Chooses the number of CPU threads of torch by measurement.

On a busy machine, or if memory is the bottleneck, fewer threads can be faster. The number of threads can change the
order of summation, so it is chosen once, before the first answer.
"""

from __future__ import annotations

import time
from statistics import fmean

import torch

from hdtool.data.files.kept_record import KEPT_SECONDS, KeptRecord
from hdtool.runtime.model.checks.trees import some_context
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree

NODES = (0, 15)
"""Sizes of the trees that are timed."""
REPEATS, PATIENCE = 3, 0.02
"""Repetitions after a warm-up pass, and the seconds after which they stop."""
MIN_SPEEDUP = 1.03
"""Twice as many threads are used only if they are faster by this factor."""


def choose_threads(target: Target, wanted: int | None = None, record: KeptRecord | None = None) -> int:
    """Set the number of threads to ``wanted``, or to the fastest number up to torch's current one; return it.

    Passes are timed with all threads, with half, and so on, until fewer are slower. With a ``record``, processes of
    the next 24 hours use the same number of threads.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif target.device.type == "cpu" and (most := torch.get_num_threads()) > 1:
        found = record.read(int, most_seconds=KEPT_SECONDS) if record else None
        if found is None or not 1 <= found <= most:
            found = _fastest(target, most)
            if record:
                record.write(found)
        torch.set_num_threads(found)
    return torch.get_num_threads()


def _fastest(target: Target, best: int) -> int:
    shortest = _seconds_with(best, target)
    while best > 1 and (seconds := _seconds_with(best // 2, target)) <= MIN_SPEEDUP * shortest:
        best, shortest = best // 2, min(shortest, seconds)
    return best


def _seconds_with(threads: int, target: Target) -> float:
    """Mean seconds of one pass of each size; the mean includes the slow passes of a busy machine."""
    torch.set_num_threads(threads)
    cache = target.allocate()
    target.prefill(cache, 0, some_context(4, target.config.vocab_size), room=max(NODES))
    trees = [DraftTree.of(0, [1] * size, [-1] * size) for size in NODES]
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
