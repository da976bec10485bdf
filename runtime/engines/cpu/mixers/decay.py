"""How much the states of recurrences forget, from the time step of each head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.layer_record import DECAY_LOG, STATE_HEADS, STEP_BIAS, Numbers
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at

LINEAR_FROM = np.float32(20)
"""Above it, the softplus of a number is the number, as in torch."""


@compiled
def step_of(layer: Numbers, head: int, number: Any) -> Any:
    """A head's time step, from what the projection gives: the softplus of it and the bias."""
    total = np.float32(number + array_at(layer[STEP_BIAS], (layer[STATE_HEADS],), types.float32)[head])
    return total if total > LINEAR_FROM else np.float32(np.log1p(np.exp(total)))


@compiled
def decay_of(layer: Numbers, head: int, step: Any) -> Any:
    """The factor of a head's state for a time step."""
    rate = np.float32(np.exp(array_at(layer[DECAY_LOG], (layer[STATE_HEADS],), types.float32)[head]))
    return np.float32(np.exp(np.float32(-rate * step)))
