"""Answers of a benchmark, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hdtool.data.conversation_shapes import AnsweredQuestion, AnsweredTurn


def turn_of(steps: Sequence[int], seconds: float, first: int = 0, **known: object) -> AnsweredTurn:
    """A turn of so many tokens in each step: they count up from ``first``."""
    output_ids = list(range(first, first + sum(steps)))
    return AnsweredTurn(f"{output_ids}", output_ids, list(steps), seconds, "stop", **known)  # type: ignore[arg-type]


def answered(name: int | str, category: str, *turns: AnsweredTurn) -> AnsweredQuestion:
    return AnsweredQuestion(name, category, turns, (tuple(turn.seconds for turn in turns),))
