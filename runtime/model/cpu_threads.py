"""How many threads torch computes with on a CPU: as many as are fastest, as measured.

Threads that wait for each other on a busy machine, or for memory, make a pass slower than fewer of them would. Sums
may come in another order with another number of them, so it is chosen once, before anything is said.
"""

from __future__ import annotations

import time
from statistics import fmean

import torch

from hdtool.runtime.model.target import Target, some_context
from hdtool.runtime.tree import DraftTree

NODES = (0, 15)
"""Trees of these sizes stand for those of an answer."""
TIMES, PATIENCE = 3, 0.02
"""Each is timed so often, after a pass that wakes the threads up, or until so many seconds are over."""
WORTH = 1.03
"""Twice as many threads must be so much faster; else they are left to others."""


def settle_threads(target: Target, wanted: int | None = None) -> int:
    """Compute with ``wanted`` threads, or as many as are fastest, at most those that torch has now; returns how many.

    Passes are timed with all of them, with half, and so on, until fewer are slower.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif target.device.type == "cpu" and torch.get_num_threads() > 1:
        torch.set_num_threads(_fastest(target, torch.get_num_threads()))
    return torch.get_num_threads()


def _fastest(target: Target, best: int) -> int:
    shortest = _seconds_with(best, target)
    while best > 1 and (taken := _seconds_with(best // 2, target)) <= WORTH * shortest:
        best, shortest = best // 2, min(shortest, taken)
    return best


def _seconds_with(threads: int, target: Target) -> float:
    """Of a pass of each size in turn: the mean, since what a busy machine costs is in the slow ones."""
    torch.set_num_threads(threads)
    target.prefill(some_context(4, target.config.vocab_size), max(NODES))
    target.commit([])
    trees = [DraftTree.of(0, [1] * size, [-1] * size) for size in NODES]
    taken: list[float] = []
    began = time.perf_counter()
    for turn in range(TIMES + 1):
        before = target.seconds_in_model
        for tree in trees:
            target.verify(tree)
        taken.append(target.seconds_in_model - before)
        if turn and time.perf_counter() - began > PATIENCE:
            break
    return fmean(taken[1:])
