"""Times the host's part of plain decoding steps on a CPU: ``python -m tests.benchmarks.plain_steps``.

Compiled passes compute nothing, so a step takes only what hdtool does around its pass. Prints the CPU time of a step in
microseconds over windows of 20 steps: the median, and the lowest decile, which says more on a busy machine. ``--lines``
lists the functions in which the time is spent.
"""

from __future__ import annotations

import cProfile
import time
from itertools import islice
from typing import Any

import numba
import numpy as np

from hdtool.data import demo
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Stats
from hdtool.runtime.core.tree import ROOT
from hdtool.runtime.engines.cpu import tree_pass
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.benchmarks.laboratory import parser_of

PROMPT, TOKEN, WINDOW = [1, 2, 3, 4], 5, 20


def main() -> None:
    options = parser_of(__doc__, answers=20, tokens=400, lines=False).parse_args()
    target = load(ModelConfig(str(demo.MODEL), device="cpu")).target
    answer(target, 8)
    skip_passes(target)
    answer(target, options.tokens)
    if options.lines:
        cProfile.runctx("answer(target, options.tokens)", globals(), locals(), sort="tottime")
        return
    times = 1e6 * np.concatenate([answer(target, options.tokens) for _ in range(options.answers)])
    print(f"{np.median(times):.2f} µs of CPU time a step, {np.quantile(times, 0.1):.2f} in the fastest tenth")


def skip_passes(target: Target) -> None:
    """Let passes over trees do nothing; each walk chooses ``TOKEN``."""
    compiled = target.compiled
    assert compiled
    for one in compiled._passes.values():
        one._walk_results[:] = 1, 1
        one._memory["argmax_walks"][:, :, 0] = TOKEN, ROOT

    @numba.njit
    def no_pass(at: int, threads: int, slots: int, tokens: Any, parents: Any, forced: Any, *rest: Any) -> bool:
        return True

    setattr(tree_pass, "compute_trees", no_pass)  # noqa: B010


def answer(target: Target, tokens: int) -> list[float]:
    """Return the mean seconds of a step in each window of an answer, without the step that reads the prompt."""
    steps, stats = decode(target, PROMPT, Sampler(SamplingConfig(), PROMPT), max_new_tokens=tokens + 1), Stats()
    next(steps)
    means = []
    for _ in range(tokens // WINDOW):
        began = time.thread_time()
        for step in islice(steps, WINDOW):
            stats.add(step)
        means.append((time.thread_time() - began) / WINDOW)
    return means


if __name__ == "__main__":
    main()
