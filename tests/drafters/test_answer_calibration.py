"""The factor of an answer: how often its next token was drafted, over how often that was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, replay_method
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.drafters.hierarchy.compiled_source import WORKSPACE
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.tree_growth import (
    EXPECTED_HITS,
    MAX_FACTOR,
    calibrate,
    count_hit,
    start_calibration,
)
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.stores.store_set import StoreSet

STEEP = CostCurve.parse("0:22,1:26.5,3:27,7:31,15:54,63:150")
"""A small model after 16,000 tokens."""
DRAWN, OTHERS = 7, 9


class Calibration:
    """The record of an answer."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, WORKSPACE)
        self._work = self._memory.view(np.recarray)[0]
        start_calibration(self._work)

    @property
    def factor(self) -> float:
        """What a probability of a half is multiplied by."""
        self._work.probs[1] = 0.5
        calibrate(self._work, 1)
        self._work.grown = 0
        return float(self._work.calibrated[0] / 0.5)

    def observe(self, probs: list[float], parents: list[int], token: int) -> float:
        nodes = slice(1, len(probs) + 1)
        self._work.tokens[nodes] = np.arange(DRAWN, DRAWN + len(probs))
        self._work.parents[nodes], self._work.probs[nodes] = parents, probs
        self._work.grown = len(probs)
        count_hit(self._work, token)
        return self.factor

    def start(self) -> None:
        start_calibration(self._work)


def test_hits_and_expected_hits_are_those_after_the_root() -> None:
    factor = Calibration().observe([0.5, 0.4, 0.25], [0, 1, 0], DRAWN + 2)
    assert factor == pytest.approx((EXPECTED_HITS + 1) / (EXPECTED_HITS + 0.75))
    factor = Calibration().observe([0.5, 0.4, 0.25], [0, 1, 0], DRAWN + 1)  # a token below a node is no hit
    assert factor == pytest.approx(EXPECTED_HITS / (EXPECTED_HITS + 0.75))


def test_the_factor_has_a_limit_forgets_and_starts_anew() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe([0.1], [0], DRAWN)
    assert calibration.factor == MAX_FACTOR
    for _ in range(1000):
        calibration.observe([0.5], [0], DRAWN + OTHERS)
    assert calibration.factor < 0.1
    calibration.start()
    assert calibration.factor == 1.0


def seconds_of(turn: RecordedTurn) -> float:
    """Estimated seconds of an answer's steps, over those of plain decoding."""
    contender = ReplayMethod("hd", DecodeConfig(method="hd"), STEEP)
    (replayed,) = replay_method(contender, [turn], StoreSet()).turns
    nodes = replayed.nodes[1:]
    return float(
        STEEP.seconds_of_passes(nodes, np.zeros(len(nodes))).sum() / (STEEP.seconds(0) * (len(turn.answer) - 1))
    )


def uncalibrated(self: Hierarchy, context: Sequence[int], prepare: Any = Hierarchy.prepare) -> int:
    nodes = int(prepare(self, context))
    self.work["hits"] = self.work["expected_hits"] = EXPECTED_HITS
    return nodes


def test_an_answer_that_seems_predictable_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    text = random.permutation(600) + 10
    prompt, answer = [*text, *text, *text], random.choice(text, 96)
    turn = RecordedTurn("0", "", 0, list(map(int, prompt)), list(map(int, answer)))
    calibrated = seconds_of(turn)
    monkeypatch.setattr(Hierarchy, "prepare", uncalibrated)
    assert calibrated < 1.02 < seconds_of(turn)
