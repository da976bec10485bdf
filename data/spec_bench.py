"""Answered questions in the format of Spec-Bench: one JSON object per question and method.

The scripts of Spec-Bench read `choices[0]`: the texts of all turns, and, one number per turn, `decoding_steps`,
`new_tokens` and `wall_time`; `accept_lengths` holds the tokens of every step of all turns. hdtool adds the other
keys.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AnsweredTurn:
    """The answer to one turn, with its measurements."""

    text: str
    output_ids: list[int]
    step_tokens: list[int]
    """The tokens of each forward pass: accepted and bonus tokens."""
    seconds: float
    """From the ids of the prompt to those of the answer, the pass over the prompt included."""
    finish: str
    nodes: int = 0
    """Draft nodes over all steps."""
    draft_seconds: float | None = None
    """Time of drafting; None if unknown."""
    model_seconds: float | None = None
    """Time in the model's forward pass; None if unknown."""
    drafted_by: list[int] = field(default_factory=list)
    """The number of each token's source, 0 for a bonus token; empty if unknown."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Counts per source, by name."""


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question with the answers of one method to all its turns."""

    question_id: int | str
    category: str
    turns: tuple[AnsweredTurn, ...]
    seconds_rounds: tuple[tuple[float, ...], ...] = ()
    """The seconds of each turn in each round; the answer is that of one round."""

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
        """Raises KeyError, TypeError or ValueError if hdtool did not write the row."""
        choice = first_choice(row["choices"])
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
"""The fields of a turn that hdtool adds to the format."""


def first_choice(choices: Any) -> dict[str, Any]:
    """The first of a row's ``choices``; a ``ValueError`` unless it has ``turns``, a list of texts."""
    choice: dict[str, Any] = choices[0] if isinstance(choices, list) and choices else {}
    turns = choice.get("turns") if isinstance(choice, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("`choices` must begin with an object that has `turns`, a list of texts")
    return choice


def question_id(name: str) -> int | str:
    """The id as in the file of questions: Spec-Bench numbers its questions."""
    return int(name) if name.isdecimal() and str(int(name)) == name else name


def _cut(lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The steps of all turns, split by turn."""
    if sum(counts) != len(lengths):
        raise ValueError("accept_lengths and decoding_steps differ")
    rest = iter(lengths)
    return [[next(rest) for _ in range(count)] for count in counts]
