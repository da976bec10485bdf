"""The predictions of trained heads for the tokens after the root; each head counts as an n-gram order."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.config import MOST_HEADS
from hdtool.runtime.kernels.compiled import Array

BEST = 10
"""Tokens of each head."""
WHOLE = 1_000_000
"""Shares are in millionths."""

HEADS = np.dtype(
    [
        ("count", np.int64),  # of heads; 0 where there are no predictions
        ("ahead", np.int64),  # tokens that were emitted since
        ("tokens", np.int64, (MOST_HEADS, BEST)),  # most probable first
        ("shares", np.int64, (MOST_HEADS, BEST)),
    ],
    align=True,
)


def note(memory: Array, tokens: Array, probs: Array) -> None:
    """Store the best tokens ``[heads, best]`` of each head after the root, and their probabilities."""
    heads, best = tokens.shape
    memory["count"], memory["ahead"] = heads, 0
    memory["tokens"][0, :heads, :best] = tokens
    memory["shares"][0, :heads] = 0
    memory["shares"][0, :heads, :best] = probs * WHOLE
