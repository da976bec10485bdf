"""Benchmark answers with given steps and times."""

from __future__ import annotations

from collections.abc import Sequence

from hdtool.data.answered_questions import AnsweredQuestion, AnsweredTurn


def turn_of(steps: Sequence[int], seconds: float, first: int = 0, **known: object) -> AnsweredTurn:
    """Create a turn whose steps have these numbers of tokens. The token ids count up from ``first``."""
    output_ids = list(range(first, first + sum(steps)))
    return AnsweredTurn(f"{output_ids}", output_ids, list(steps), seconds, "stop", **known)  # type: ignore[arg-type]


def answered(name: int | str, category: str, *turns: AnsweredTurn) -> AnsweredQuestion:
    return AnsweredQuestion(name, category, turns, (tuple(turn.seconds for turn in turns),))
