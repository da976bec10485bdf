"""Prompts from an option, a file or a pipe.

A text file holds one prompt per line. Of the conversations in any other input, the prompt is all up to the last
message that the model did not write; ``turns`` of Spec-Bench are answered one after another. The ``prediction`` of a
JSON object is what the answer will probably look like; its ``json_schema``, ``regex``, ``grammar`` or
``response_format`` is what the answer must match, and its ``tools`` are presented by the chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data.conversations.conversation import QUESTIONS, TEXT, USER, Conversation
from hdtool.data.conversations.messages import media_part
from hdtool.data.conversations.reader import ConversationReader, Found
from hdtool.data.errors import PromptError, RecordError
from hdtool.data.formats.hub import files_of, is_hub_name
from hdtool.data.formats.row import RowError
from hdtool.data.grammar import grammar_of
from hdtool.data.predictions import prediction_of
from hdtool.data.tally import Tally
from hdtool.data.tools import tools_of

if TYPE_CHECKING:
    from hdtool.data.grammar import Grammar

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer, and the user's later turns."""

    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    id: str = ""
    category: str = ""
    prediction: str = ""
    """What the first answer will probably look like: it is drafted from, and never read by the model."""
    grammar: Grammar | None = None
    """What each answer must match."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, as OpenAI's API has them; the chat template presents them."""

    @classmethod
    def from_text(cls, text: str, *, id: str = "", where: str = "the prompt") -> Prompt:
        if not text.strip():
            raise PromptError(f"{where} is empty: give some text to answer")
        return cls(messages=({"role": "user", "content": text},), id=id)

    def conversation(self, answers: Sequence[str]) -> list[Message]:
        """The messages after these answers: each is followed by the user's next turn, if there is one."""
        messages = [dict(message) for message in self.messages]
        for answer, turn in zip_longest(answers, self.later_turns[: len(answers)]):
            messages.append({"role": "assistant", "content": answer})
            if turn is not None:
                messages.append({"role": "user", "content": turn})
        return messages


def read_prompts(path: Path, *, tolerance: float | None = None, tally: Tally | None = None) -> list[Prompt]:
    """All prompts of a file.

    Without a ``tolerance``, the first row that is none is an error. With one, such rows are counted in ``tally``.
    """
    try:
        return _prompts(path, tolerance, tally)
    except RecordError as error:
        raise PromptError(str(error)) from None


def _prompts(path: Path, tolerance: float | None, tally: Tally | None) -> list[Prompt]:
    paths = files_of(str(path)) if is_hub_name(str(path)) else [path]
    reader = ConversationReader(paths, text_lines=True)
    prompts: list[Prompt] = []
    for found in (found for source in range(len(paths)) for found in reader.of_input(source)):
        try:
            prompts.append(_prompt_of(found))
        except RowError as fault:
            reader.tally.refuse(found.where, fault)
        if tolerance is None:
            _refuse_bad(reader.tally)
    if tolerance is None:
        _refuse_bad(reader.tally)
    if tally is not None:
        tally.add(reader.tally)
    reader.tally.check(tolerance or 0.0)
    return prompts


def _refuse_bad(tally: Tally) -> None:
    if tally.bad:
        raise PromptError(f"{tally.shown[0]}: correct or remove it")


def of_all_categories(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """The first prompts of every category, alternating between categories."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return alternating(groups.values())[:most]


def alternating(groups: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """The first prompt of every group, then the second of every group, and so on."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


def _prompt_of(found: Found) -> Prompt:
    conversation, where = found.conversation, found.where
    messages, later = _asked(conversation)
    _require_text(found.row.value)
    row = found.row.value if isinstance(found.row.value, dict) else {}
    return Prompt(
        messages,
        later,
        id=conversation.id or str(found.row.number),
        category=conversation.category,
        prediction=prediction_of(row.get("prediction"), where),
        grammar=grammar_of(row, where),
        tools=tools_of(row.get("tools"), where),
    )


def _require_text(row: Any) -> None:
    """Refuse a prompt with an image or a sound: the answer would not be about it."""
    messages = row.get("messages") if isinstance(row, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and (kind := media_part(message.get("content"))):
            raise RowError(f"a message has a part of type {kind[:40]!r}, and hdtool answers text only")


def _asked(conversation: Conversation) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The conversation up to its last question, without a recorded answer to it, and the user's later turns."""
    turns = list(conversation.turns)
    if conversation.kind == TEXT:
        return ({"role": USER, "content": turns[0].text},), ()
    if conversation.kind == QUESTIONS:
        return ({"role": USER, "content": turns[0].text},), tuple(turn.text for turn in turns[1:])
    while turns and turns[-1].by_model:
        turns.pop()
    if not turns:
        raise RowError("the conversation holds answers only: a user's message is needed")
    return tuple({"role": turn.role, "content": turn.text} for turn in turns), ()
