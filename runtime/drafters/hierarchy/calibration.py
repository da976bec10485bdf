"""Calibration of the probabilities of nodes by how many of them were accepted lately."""

from __future__ import annotations

from typing import Any

from hdtool.runtime.kernels.compiled import compiled

PRIOR, DECAY = 10.0, 0.995
"""Tokens that the calibration begins with, both predicted and accepted, and the decay of both in each step."""
TOLERANCE = 1.1
"""Probabilities are scaled down only where they exceed acceptance by this factor: smaller differences are noise."""


@compiled
def calibrate(work: Any, nodes: int) -> None:
    """Write the calibrated probabilities of so many nodes."""
    scale = min(1.0, TOLERANCE * work.accepted / work.predicted)
    for node in range(nodes):
        work.calibrated[node] = scale * work.probs[node + 1]


@compiled
def learn_calibration(work: Any, accepted: int, nodes: int) -> None:
    """Compare the number of accepted nodes with the probabilities of all nodes of a tree."""
    predicted = 0.0
    for node in range(1, nodes + 1):
        predicted += work.probs[node]
    if predicted > 0:
        work.accepted = DECAY * work.accepted + accepted
        work.predicted = DECAY * work.predicted + predicted
