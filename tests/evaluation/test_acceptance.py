"""What drafting brings on recorded answers of the demo model: a change of the drafters that loses tokens fails here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdtool.cli.app import run
from tests.support.project import ROOT

ANSWERS = ROOT / "tests" / "support" / "demo_answers.jsonl"
"""Greedy answers to 32 of the demo's prompts, as `hdtool collect --max-new-tokens 200` wrote them."""
TOKENS_PER_STEP = {"pld": 2.448, "rest": 1.918, "hd-paper": 3.164, "hd": 5.099}
"""With 32 draft tokens, the demo's stores, and answers replayed one after another.

`hdtool replay --traces tests/support/demo_answers.jsonl --methods pld,rest,hd-paper,hd --workers 1`
"""


def test_tokens_per_step_stay_within_one_percent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ",".join(TOKENS_PER_STEP)
    arguments = ["replay", "--traces", str(ANSWERS), "--methods", methods, "--workers", "1", "--json", "--quiet"]
    assert run(arguments) == 0
    found = {name: row["tokens_per_step"] for name, row in json.loads(capsys.readouterr().out)["methods"].items()}
    assert found == {name: pytest.approx(expected, rel=0.01) for name, expected in TOKENS_PER_STEP.items()}
