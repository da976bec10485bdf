"""Known draws: which tokens a seed favors at a position does not depend on the model.

A token is drawn by an exponential race, where it gets a time by its probability (``exponential_race.py``). For a
probability of 1 that time is a function of seed, position and token, so it is known before the model has computed
anything. With exact probabilities the winner would be known as well; estimates are not exact, so the time shifts them:
by its inverse root, which fits best (``docs/notebook/2026-11-25-known-draws.md``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.candidates import whole
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.sampling.exponential_race import start_of, time_of

EARLIEST = 1e-12
"""Of a time that may be 0."""


@compiled
def weigh_draws(work: Any, node: int) -> None:
    """Divide the probability of each candidate after a node by the root of its time, and rescale.

    All other tokens together have no time that is known: they keep the root of what is left to them.
    """
    start = start_of(work.seed, work.position + work.depths[node])
    sum_of_all = np.sqrt(max(0.0, 1.0 - whole(work)))
    for at in range(work.size):
        work.chances[at] /= np.sqrt(max(EARLIEST, time_of(start, work.candidates[at])))
        sum_of_all += work.chances[at]
    for at in range(work.size):
        work.chances[at] /= sum_of_all
