"""Traces: recorded conversations, for replaying drafts without the model.

Every conversation that any command reads can be replayed if it holds answers of the model: those with recorded tokens,
or the model's turns after another role. Answer files of Spec-Bench need the file of their questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hdtool.data.conversations.conversation import ANSWERS, QUESTIONS, STOPPED, Conversation, answered
from hdtool.data.conversations.rankings import Rankings
from hdtool.data.conversations.reader import ConversationReader, Found
from hdtool.data.errors import OptionError, RecordError
from hdtool.data.formats.row import RowError
from hdtool.data.prompts import Message
from hdtool.data.tally import TOLERANCE, Tally


@dataclass(frozen=True)
class Recorded:
    """An answer of the model."""

    place: int
    """The index of its message in the conversation."""
    ids: tuple[int, ...] | None = None
    """Its tokens, with the one that ends the turn, if they were recorded."""
    most: int | None = None
    """The limit of its tokens, if known; an answer of this length was cut off."""
    rankings: Rankings | None = None


@dataclass(frozen=True)
class Trace:
    """A conversation, and which of its messages are the model's answers."""

    id: str
    category: str
    messages: tuple[Message, ...]
    answers: tuple[Recorded, ...]
    where: str
    """Its file and line, for messages."""


def read_traces(
    paths: Sequence[Path], questions: Path | None = None, *, tolerance: float = TOLERANCE, tally: Tally | None = None
) -> list[Trace]:
    """All conversations of some files in order; what cannot be used is counted in ``tally``."""
    asked = _questions(questions) if questions else {}
    reader = ConversationReader(paths, tolerance=1.0)
    found: list[Trace] = []
    joined = 0
    for one in reader.conversations():
        try:
            joined += bool(asked) and one.conversation.kind == ANSWERS
            found.append(_trace(one, asked))
        except RowError as fault:
            reader.tally.refuse(one.where, fault)
    if tally is not None:
        tally.add(reader.tally)
    reader.tally.check(tolerance)
    if questions and not joined:
        raise OptionError(f"--questions {questions} belongs to answer files of Spec-Bench, and no trace is one")
    if not any(trace.answers for trace in found):
        names = ", ".join(map(str, paths))
        raise RecordError(f"no answers of a model are in {names}: name conversations with assistant messages")
    return found


def _questions(path: Path) -> Mapping[str, Conversation]:
    """The questions of Spec-Bench by the keys of their answers."""
    reader = ConversationReader([path])
    found = {f"question {one.conversation.id}": one.conversation for one in reader.conversations()}
    return {key: replace(one, kind=QUESTIONS) for key, one in found.items()}


def _trace(found: Found, questions: Mapping[str, Conversation]) -> Trace:
    conversation = found.conversation
    if conversation.kind == ANSWERS:
        conversation = answered(_question_of(conversation, questions), conversation)
    messages = tuple({"role": turn.role, "content": turn.text} for turn in conversation.turns)
    return Trace(
        conversation.id or str(found.row.number),
        conversation.category,
        messages,
        tuple(_recorded(conversation)),
        found.where,
    )


def _question_of(answers: Conversation, questions: Mapping[str, Conversation]) -> Conversation:
    if not answers.key.startswith("question "):
        raise RowError("an answer of a batch without its request: name the file of the requests too")
    if not questions:
        raise RowError(
            "answers without their questions, as Spec-Bench writes them: name the questions with --questions FILE"
        )
    if answers.key not in questions:
        raise RowError(f"it answers {answers.key}, which the file of questions lacks: name the file of these questions")
    return questions[answers.key]


def _recorded(conversation: Conversation) -> Iterator[Recorded]:
    for place in conversation.answers:
        turn = conversation.turns[place]
        if turn.ids:
            most = conversation.max_new_tokens if turn.finish == STOPPED else len(turn.ids)
            yield Recorded(place, turn.ids, most, turn.rankings)
        elif turn.text.strip():
            yield Recorded(place)
