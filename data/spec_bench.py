"""Answered questions, as Spec-Bench writes them: one JSON object for each question and method.

Its scripts read `choices[0]`: the texts of all turns, and, a number for each turn, `decoding_steps`,
`new_tokens` and `wall_time`; `accept_lengths` holds the tokens of every step of all turns. The other
keys are ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AnsweredTurn:
    """The answer to one turn, and what it took."""

    text: str
    output_ids: list[int]
    step_tokens: list[int]
    """The tokens that each forward pass brought."""
    seconds: float
    """From the ids of the prompt to those of the answer, the prompt's own pass included."""
    finish: str
    nodes: int = 0
    """Drafted, over all steps."""
    draft_seconds: float | None = None
    """Of drafting; None where nobody can tell."""
    model_seconds: float | None = None
    """Inside the model's forward pass."""
    drafted_by: list[int] = field(default_factory=list)
    """The number of the source of each token, 0 for the model's own; empty where nobody can tell."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each source drafted, by its name."""


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question, all of its turns answered by one method."""

    question_id: int | str
    category: str
    turns: tuple[AnsweredTurn, ...]
    seconds_rounds: tuple[tuple[float, ...], ...] = ()
    """Of each turn, in each of the rounds that this one was chosen from."""

    @property
    def tokens_per_second(self) -> float:
        return sum(self.new_tokens) / sum(turn.seconds for turn in self.turns)

    @property
    def new_tokens(self) -> list[int]:
        return [len(turn.output_ids) for turn in self.turns]

    @property
    def step_tokens(self) -> list[int]:
        return [tokens for turn in self.turns for tokens in turn.step_tokens]

    @property
    def output_ids(self) -> list[list[int]]:
        return [turn.output_ids for turn in self.turns]

    def to_json(self, model_id: str) -> dict[str, Any]:
        turns = self.turns
        choice = {
            "index": 0,
            "turns": [turn.text for turn in turns],
            "decoding_steps": [len(turn.step_tokens) for turn in turns],
            "new_tokens": self.new_tokens,
            "wall_time": [turn.seconds for turn in turns],
            "accept_lengths": self.step_tokens,
            "output_ids": self.output_ids,
            "seconds_rounds": self.seconds_rounds,
            **{name: [getattr(turn, name) for turn in turns] for name in OWN_KEYS},
        }
        return {
            "question_id": self.question_id,
            "category": self.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> AnsweredQuestion:
        """Raises KeyError, TypeError, IndexError or ValueError if a row is none of ours."""
        choice = row["choices"][0]
        lengths = _cut(choice["accept_lengths"], choice["decoding_steps"])
        turns = tuple(
            AnsweredTurn(text, output_ids, step_tokens, seconds, **dict(zip(OWN_KEYS, own, strict=True)))
            for text, output_ids, step_tokens, seconds, *own in zip(
                choice["turns"],
                choice["output_ids"],
                lengths,
                choice["wall_time"],
                *(choice[name] for name in OWN_KEYS),
                strict=True,
            )
        )
        return cls(row["question_id"], row["category"], turns, tuple(map(tuple, choice["seconds_rounds"])))


OWN_KEYS = ("finish", "nodes", "draft_seconds", "model_seconds", "drafted_by", "sources")
"""Of a turn, kept under their own names beside those of Spec-Bench."""


def question_id(name: str) -> int | str:
    """As the file of questions had it: Spec-Bench counts its questions."""
    return int(name) if name.isdecimal() and str(int(name)) == name else name


def _cut(lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The steps of all turns, turn by turn."""
    if sum(counts) != len(lengths):
        raise ValueError("accept_lengths and decoding_steps differ")
    rest = iter(lengths)
    return [[next(rest) for _ in range(count)] for count in counts]
