"""The token ids of answers, which ``hdtool collect`` records beside their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdtool.data.conversations.conversation import STOPPED, Turn
from hdtool.data.conversations.rankings import Rankings
from hdtool.data.formats.row import RowError


def is_collected(row: dict[str, Any]) -> bool:
    """Whether the ``answers`` of a row are those of ``collect``; some data sets have others."""
    answers = row.get("answers")
    ids = isinstance(answers, list) and any(isinstance(one, dict) and "output_ids" in one for one in answers)
    return ids or ("answers" in row and "max_new_tokens" in row)


def with_ids(turns: Sequence[Turn], row: dict[str, Any]) -> list[Turn]:
    """The turns with the tokens of the last answers; those before them belong to the prompt."""
    answers, most = row["answers"], row.get("max_new_tokens")
    places = [place for place, turn in enumerate(turns) if turn.by_model]
    if not isinstance(answers, list) or not 0 < len(answers) <= len(places):
        raise RowError(f"`answers` must be a list with one entry for each of the model's messages ({len(places)})")
    if most is not None and not _is_number(most):
        raise RowError(f"`max_new_tokens` must be a number (found: {most!r})")
    result = list(turns)
    for place, answer in zip(places[-len(answers) :], answers, strict=True):
        result[place] = _recorded(turns[place], answer, most)
    return result


def _recorded(turn: Turn, answer: Any, most: int | None) -> Turn:
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or not all(_is_number(token) for token in ids):
        raise RowError("every entry of `answers` needs `output_ids`, a list of token ids")
    finish = str(answer.get("finish") or "")
    if finish == STOPPED and most is not None and most < len(ids):
        raise RowError(f"an answer is {len(ids)} tokens long, and `max_new_tokens` is {most}")
    rankings = Rankings.of_json(answer["rankings"], len(ids)) if "rankings" in answer else None
    return turn._replace(ids=tuple(ids), finish=finish, rankings=rankings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
