"""The last logit: tokens that the target ranked high in place of the root are often the next ones (LogitSpec)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled

MOST_CANDIDATES = 60
KINDS = 8
"""The kind of a candidate is its probability: a half or more, a quarter or more, and so on."""

LAST = np.dtype(
    [
        ("count", np.int64),  # of candidates; 0 where the ranking of the root is missing
        ("tokens", np.int64, MOST_CANDIDATES),  # most probable first
        ("kinds", np.int64, MOST_CANDIDATES),
    ],
    align=True,
)


@compiled
def remember(memory: Array, root: int, tokens: Array, scores: Array) -> None:
    """Store the top tokens that the root was chosen from, and their logits, without the root itself."""
    last = memory[0]
    last.count = 0
    if not np.isfinite(scores[0]):
        return
    chances = np.exp(scores - scores[0])
    chances /= chances.sum()
    for place in range(len(tokens)):
        if tokens[place] != root and chances[place] > 0 and last.count < MOST_CANDIDATES:
            last.tokens[last.count] = tokens[place]
            last.kinds[last.count] = min(KINDS - 1, int(-np.log2(chances[place])))
            last.count += 1


@compiled
def forget(last: Any) -> None:
    last.count = 0
