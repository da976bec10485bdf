"""What trained heads say of the tokens behind the root, as levels of evidence: one for each head."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import MOST_HEADS

BEST = 10
"""Tokens of each head that are looked at."""
WHOLE = 1_000_000
"""Shares are in millionths."""

HEADS = np.dtype(
    [
        ("count", np.int64),  # of heads; 0 where they have not been asked
        ("ahead", np.int64),  # tokens that were emitted since they were
        ("tokens", np.int64, (MOST_HEADS, BEST)),  # likeliest first
        ("shares", np.int64, (MOST_HEADS, BEST)),
    ],
    align=True,
)

Array = npt.NDArray[Any]


def note(memory: Array, tokens: Array, probs: Array) -> None:
    """Take each head's best tokens ``[heads, best]`` behind the root, and how likely each of them is."""
    heads, best = tokens.shape
    memory["count"], memory["ahead"] = heads, 0
    memory["tokens"][0, :heads, :best] = tokens
    memory["shares"][0, :heads] = 0
    memory["shares"][0, :heads, :best] = probs * WHOLE
