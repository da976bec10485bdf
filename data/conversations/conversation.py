"""A conversation: turns with their roles, as every reader of inputs has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hdtool.data.conversations.rankings import Rankings
from hdtool.data.formats.row import RowError

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)

CHAT = "chat"
TEXT = "text"
"""A plain text: a document, an answer or a prompt, as the command takes it."""
QUESTIONS = "questions"
"""Turns of the user, answered one after another, as in Spec-Bench's file of questions."""
REQUEST = "request"
"""A request whose answer is in another row."""
ANSWERS = "answers"
"""Answers whose questions are in other rows."""
STOPPED = "stop"
"""The ``finish`` of an answer that the model ended itself."""


class Turn(NamedTuple):
    """A message."""

    role: str
    text: str
    ids: tuple[int, ...] | None = None
    """The tokens of an answer, with the one that ends it, if they were recorded."""
    finish: str = ""
    """How a recorded answer ended: ``stop`` or a limit."""
    rankings: Rankings | None = None
    """Of a recorded answer."""

    @property
    def by_model(self) -> bool:
        return self.role == ASSISTANT


@dataclass(frozen=True)
class Conversation:
    """A conversation or a plain text."""

    turns: tuple[Turn, ...]
    id: str = ""
    category: str = ""
    kind: str = CHAT
    key: str = ""
    """What questions or a request share with their answers."""
    max_new_tokens: int | None = None
    """The limit of recorded answers."""
    prompted: int = 0
    """The first turns that were sent to the model, its earlier answers included."""
    model: str = field(default="", compare=False)
    """The model that answered, as the record names it."""

    @property
    def answers(self) -> list[int]:
        """The places of the model's answers: those with recorded tokens, else its turns after another role."""
        if recorded := [place for place, turn in enumerate(self.turns) if turn.ids]:
            return recorded
        roles = [turn.role for turn in self.turns]
        places = range(max(1, self.prompted), len(roles))
        return [place for place in places if roles[place] == ASSISTANT != roles[place - 1]]

    @property
    def new_turns(self) -> tuple[Turn, ...]:
        """The turns that earlier requests of the same conversation did not hold."""
        earlier = [place for place, turn in enumerate(self.turns[: self.prompted]) if turn.by_model]
        return self.turns[earlier[-1] + 1 if earlier else 0 :]


def answered(asked: Conversation, answers: Conversation) -> Conversation:
    """Questions or a request with their answers; raises a ``RowError`` if there are more answers than turns."""
    turns: Sequence[Turn] = (*asked.turns, *answers.turns)
    prompted = len(asked.turns)
    if asked.kind == QUESTIONS:
        if len(answers.turns) > len(asked.turns):
            raise RowError(f"{len(answers.turns)} answers to a question of {len(asked.turns)} turns")
        turns = [turn for pair in zip(asked.turns, answers.turns, strict=False) for turn in pair]
        prompted = 0
    category = asked.category or answers.category
    model = asked.model or answers.model
    return replace(asked, turns=tuple(turns), category=category, kind=CHAT, key="", prompted=prompted, model=model)
