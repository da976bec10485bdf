"""Read and write the answers to a benchmark's questions as rows in Spec-Bench's format.

Spec-Bench's scripts read ``choices[0]``: the texts of all turns and, with one number per turn, ``decoding_steps``,
``new_tokens`` and ``wall_time``. ``accept_lengths`` has, for each step of all turns, the number of tokens that it
yielded. hdtool adds ``output_ids``, ``seconds_rounds``, ``HDTOOL_TURN_KEYS`` and ``LATER_TURN_KEYS``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AnsweredTurn:
    """Answer to one turn of a question, with its measurements."""

    text: str
    output_ids: list[int]
    step_tokens: list[int]
    """Number of tokens that each forward pass yielded: the accepted tokens and the bonus token."""
    seconds: float
    """Time from the prompt's token ids to the answer's token ids, including prefill."""
    finish: str
    nodes: int = 0
    """Number of draft tokens in all steps."""
    draft_seconds: float | None = None
    """Drafting time; None if unknown."""
    model_seconds: float | None = None
    """Time in the model's forward passes; None if unknown."""
    drafted_by: list[int] = field(default_factory=list)
    """For each token, the id of the source that drafted it, or 0 for a bonus token; empty if unknown."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Statistics of each draft source, by the name of the source."""
    first_seconds: float | None = None
    """Time to the first token; None if unknown."""
    cpu_seconds: float | None = None
    """CPU time of all threads of the process; None if unknown."""
    waited_seconds: float | None = None
    """Time that all threads together waited for a core; None if unknown."""


class Answers:
    """Answers to all turns of a question."""

    turns: tuple[AnsweredTurn, ...]

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


@dataclass(frozen=True)
class AnsweredQuestion(Answers):
    """Question with one method's answers to all its turns."""

    question_id: int | str
    category: str
    turns: tuple[AnsweredTurn, ...]
    seconds_rounds: tuple[tuple[float, ...], ...] = ()
    """For each measurement round, the seconds of each turn. ``turns`` holds the answers of one of these rounds."""

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
            **{name: [getattr(turn, name) for turn in turns] for name in (*HDTOOL_TURN_KEYS, *LATER_TURN_KEYS)},
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
        """Parse a row of an answer file; raise KeyError, TypeError or ValueError if hdtool did not write the row."""
        choice = first_choice(row["choices"])
        lengths = _split_by_turn(choice["accept_lengths"], choice["decoding_steps"])
        names = (*HDTOOL_TURN_KEYS, *(name for name in LATER_TURN_KEYS if name in choice))
        turns = tuple(
            AnsweredTurn(text, output_ids, step_tokens, seconds, **dict(zip(names, hdtool_values, strict=True)))
            for text, output_ids, step_tokens, seconds, *hdtool_values in zip(
                choice["turns"],
                choice["output_ids"],
                lengths,
                choice["wall_time"],
                *(choice[name] for name in names),
                strict=True,
            )
        )
        return cls(row["question_id"], row["category"], turns, tuple(map(tuple, choice["seconds_rounds"])))


HDTOOL_TURN_KEYS = ("finish", "nodes", "draft_seconds", "model_seconds", "drafted_by", "sources")
"""Fields of a turn that hdtool adds to Spec-Bench's format."""
LATER_TURN_KEYS = ("first_seconds", "cpu_seconds", "waited_seconds")
"""Further fields of a turn that hdtool adds; results of earlier versions lack them."""


def first_choice(choices: Any) -> dict[str, Any]:
    """Return the first of a row's ``choices``; raise ValueError unless it has ``turns``, a list of strings."""
    choice: dict[str, Any] = choices[0] if isinstance(choices, list) and choices else {}
    turns = choice.get("turns") if isinstance(choice, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("`choices` must begin with an object that has `turns`, a list of texts")
    return choice


def question_id(name: str) -> int | str:
    """Return a decimal number without leading zeros as an int, as in Spec-Bench's question file; any other id as is."""
    return int(name) if name.isdecimal() and str(int(name)) == name else name


def _split_by_turn(lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Split ``lengths``, one per step, into turns of ``counts`` steps; raise ValueError if the totals differ."""
    if sum(counts) != len(lengths):
        raise ValueError("accept_lengths and decoding_steps differ")
    rest = iter(lengths)
    return [[next(rest) for _ in range(count)] for count in counts]
