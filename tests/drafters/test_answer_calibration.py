"""The factor of an answer: how often its next token was drafted, over how often that was expected."""

from __future__ import annotations

import numpy as np
import pytest

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, replay_method
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import DecodeConfig
from hdtool.runtime.drafter import EXPECTED_HITS, MAX_FACTOR, AnswerCalibration
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.tree import ROOT

STEEP = CostCurve.parse("0:22,1:26.5,3:27,7:31,15:54,63:150")
"""A small model after 16,000 tokens."""
DRAWN, OTHERS = 7, 9


def observed(calibration: AnswerCalibration, probs: list[float], parents: list[int], token: int) -> float:
    tokens = np.arange(DRAWN, DRAWN + len(probs), dtype=np.int64)
    calibration.update(tokens, np.array(parents, np.int32), np.array(probs), token)
    return calibration.factor


def test_hits_and_expected_hits_are_those_after_the_root() -> None:
    calibration = AnswerCalibration()
    factor = observed(calibration, [0.5, 0.4, 0.25], [ROOT, 0, ROOT], DRAWN + 2)
    assert factor == pytest.approx((EXPECTED_HITS + 1) / (EXPECTED_HITS + 0.75))
    missed = AnswerCalibration()
    factor = observed(missed, [0.5, 0.4, 0.25], [ROOT, 0, ROOT], DRAWN + 1)  # a token below a node is no hit
    assert factor == pytest.approx(EXPECTED_HITS / (EXPECTED_HITS + 0.75))


def test_the_factor_has_a_limit_forgets_and_starts_anew() -> None:
    calibration = AnswerCalibration()
    for _ in range(100):
        observed(calibration, [0.1], [ROOT], DRAWN)
    assert calibration.factor == MAX_FACTOR
    for _ in range(1000):
        observed(calibration, [0.5], [ROOT], DRAWN + OTHERS)
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


def test_an_answer_that_seems_predictable_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    text = random.permutation(600) + 10
    prompt, answer = [*text, *text, *text], random.choice(text, 96)
    turn = RecordedTurn("0", "", 0, list(map(int, prompt)), list(map(int, answer)))
    calibrated = seconds_of(turn)
    monkeypatch.setattr(AnswerCalibration, "update", lambda *given: None)
    assert calibrated < 1.02 < seconds_of(turn)
