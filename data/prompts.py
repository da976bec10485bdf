"""Prompts from an option, a file or a pipe.

A file holds one prompt per line, as plain text or as JSON. A JSON object has ``messages`` (chat), ``turns``
(Spec-Bench: user turns that are answered one after another) or one of ``prompt``, ``question``, ``instruction``,
``text``. Its ``prediction`` is what the answer will probably look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hdtool.data.errors import PromptError
from hdtool.data.inputs import ENDINGS, RowError, decoded, faults_named, parsed
from hdtool.data.predictions import prediction_of

Message = dict[str, str]

TEXT_KEYS = ("prompt", "question", "instruction", "text")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer, and the user's later turns."""

    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    id: str = ""
    category: str = ""
    prediction: str = ""
    """What the first answer will probably look like: it is drafted from, and never read by the model."""

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


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; raises at the first line that is none."""
    text = _read_text(path)
    if not text.strip():
        raise PromptError(f"{path} is empty: put one prompt on each line, as text or as JSON")
    if not _is_json(path, text):
        return [Prompt.from_text(line, id=str(number)) for number, line in _lines(text)]
    if text.lstrip().startswith("["):
        rows: Iterable[tuple[int, Any]] = enumerate(_parse(text, f"{path}"), start=1)
    else:
        rows = ((number, _parse(line, f"{path}:{number}")) for number, line in _lines(text))
    return [_prompt_of(row, f"{path}:{number}", str(number)) for number, row in rows]


def of_all_categories(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """The first prompts of every category, alternating between categories."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return alternating(groups.values())[:most]


def alternating(groups: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """The first prompt of every group, then the second of every group, and so on."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


def _read_text(path: Path) -> str:
    with faults_named(path, PromptError):
        data = path.read_bytes()
    try:
        return decoded(data)
    except RowError as fault:
        raise PromptError(f"{path} is {fault}: give UTF-8 text with a prompt on each line, or JSON") from None


def _is_json(path: Path, text: str) -> bool:
    """By the ending of its name; with another ending, by its first character."""
    form = ENDINGS.get(path.suffix.lower())
    return form != "text" if form else text.lstrip().startswith("{")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # str.splitlines would also split at separators that JSON strings may contain.
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _parse(text: str, where: str) -> Any:
    try:
        return parsed(text)
    except RowError as fault:
        raise PromptError(f"{where} is {fault}: correct the line, or name a file of plain prompts .txt") from None


def _prompt_of(row: Any, where: str, number: str) -> Prompt:
    if isinstance(row, str):
        return Prompt.from_text(row, id=number, where=where)
    if not isinstance(row, dict):
        raise PromptError(f"{where} holds a JSON {_json_name(row)}: a prompt is an object with messages or a prompt")
    messages, later = _asked(row, where)
    name = next((row[key] for key in ("id", "question_id") if row.get(key) is not None), number)
    prediction = prediction_of(row.get("prediction"), where)
    return Prompt(messages, later, id=str(name), category=str(row.get("category", "")), prediction=prediction)


def _asked(row: dict[str, Any], where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if "messages" in row:
        return _messages_of(row["messages"], where), ()
    if "turns" in row:
        turns = row["turns"]
        texts = isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns)
        if not texts or not turns:
            raise PromptError(f"{where}: `turns` must be a list of texts, none of them empty")
        return ({"role": "user", "content": turns[0]},), tuple(turns[1:])
    for key in TEXT_KEYS:
        if key in row:
            if not isinstance(row[key], str):
                raise PromptError(f"{where}: `{key}` is a JSON {_json_name(row[key])}, it must be a text")
            return Prompt.from_text(row[key], where=where).messages, ()
    found = ", ".join(sorted(map(str, row))) or "nothing"
    raise PromptError(f"{where} has no prompt (found: {found}): expected messages, turns, {', '.join(TEXT_KEYS)}")


def _messages_of(value: Any, where: str) -> tuple[Message, ...]:
    """The conversation up to its last question, without a recorded answer to it."""
    asked = checked_messages(value, where)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise PromptError(f"{where}: the conversation holds answers only: a user's message is needed")
    return tuple(asked)


def checked_messages(value: Any, where: str) -> list[Message]:
    """The messages of a conversation; raises unless each has a known role and a text."""
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: `messages` must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise PromptError(f"{where}: every message needs a `role` and a text as `content`")
        if message.get("role") not in ROLES:
            raise PromptError(f"{where}: unknown role {message.get('role')!r}: expected one of {', '.join(ROLES)}")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _json_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
