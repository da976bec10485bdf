"""Traces: recorded conversations, for replaying drafts without the model.

The keys of a JSON object determine its kind:

- ``messages`` and ``answers``: what ``hdtool collect`` writes, the answers as token ids;
- ``messages``: a conversation in the chat format, whose assistant messages are the answers;
- ``choices``: an answer file of Spec-Bench, the ``turns`` of the first choice; the questions are in a separate
  file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hdtool.data.errors import OptionError, PromptError, RecordError
from hdtool.data.inputs import CountedFile, Row, RowError, faults_named, rows_of
from hdtool.data.prompts import Message, Prompt, checked_messages, read_prompts
from hdtool.data.spec_bench import turns_of

STOPPED = "stop"
"""The ``finish`` of an answer that the model ended itself."""


@dataclass(frozen=True)
class Recorded:
    """An answer of the model."""

    place: int
    """The index of its message in the conversation."""
    ids: tuple[int, ...] | None = None
    """Its tokens, with the one that ends the turn, if they were recorded."""
    most: int | None = None
    """The limit of its tokens, if known; an answer of this length was cut off."""


@dataclass(frozen=True)
class Trace:
    """A conversation, and which of its messages are the model's answers."""

    id: str
    category: str
    messages: tuple[Message, ...]
    answers: tuple[Recorded, ...]
    where: str
    """Its file and line, for messages."""


def read_traces(paths: Sequence[Path], questions: Path | None = None) -> list[Trace]:
    """All conversations of some files in order; raises at the first row that is none."""
    prompts = {prompt.id: prompt for prompt in read_prompts(questions)} if questions else None
    traces = []
    for path in paths:
        with faults_named(path), CountedFile(path) as raw:
            for number, row in enumerate(rows_of(path, raw, path.stat().st_size), start=1):
                traces.append(_trace(row, f"{path}{row.place}", number, prompts))
    if questions and not any(row_is_answers for row_is_answers, _ in traces):
        raise OptionError(f"--questions {questions} belongs to answer files of Spec-Bench, and no trace is one")
    found = [trace for _, trace in traces]
    if not any(trace.answers for trace in found):
        names = ", ".join(map(str, paths))
        raise RecordError(f"no answers of a model are in {names}: name conversations with assistant messages")
    return found


def _trace(row: Row, where: str, number: int, prompts: Mapping[str, Prompt] | None) -> tuple[bool, Trace]:
    """Whether it is a row of an answer file, and the trace."""
    value = row.value
    if isinstance(value, RowError):
        raise RecordError(f"{where}: {value}: correct or remove it")
    if not isinstance(value, dict):
        _refuse(where, f"a recorded conversation is a JSON object (found: {type(value).__name__})")
    try:
        if "choices" in value:
            return True, _of_answer_file(value, where, prompts)
        if "messages" not in value:
            _refuse(where, f"no `messages` or `choices` in it (found: {', '.join(map(str, value)) or 'nothing'})")
        messages = checked_messages(value["messages"], where)
    except PromptError as error:
        raise RecordError(f"{error}; correct or remove it") from None
    name = next((value[key] for key in ("id", "question_id") if value.get(key) is not None), number)
    answers = _of_collect(value, messages, where) if "answers" in value else _of_chat(messages)
    return False, Trace(str(name), _category(value), tuple(messages), answers, where)


def _category(row: dict[str, Any]) -> str:
    category = row.get("category")
    return "" if category is None else str(category)


def _of_chat(messages: Sequence[Message]) -> tuple[Recorded, ...]:
    """The assistant's messages after another role; one that opens a conversation answers nothing."""
    roles = [message["role"] for message in messages]
    answers = (place for place in range(1, len(roles)) if roles[place] == "assistant" != roles[place - 1])
    return tuple(Recorded(place) for place in answers)


def _of_collect(row: dict[str, Any], messages: Sequence[Message], where: str) -> tuple[Recorded, ...]:
    """The last messages of the assistant are the collected answers; those before them belong to the prompt."""
    answers, most = row["answers"], row.get("max_new_tokens")
    said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(answers, list) or not 0 < len(answers) <= len(said):
        _refuse(where, f"`answers` must be a list with one entry for each of the model's messages ({len(said)})")
    if most is not None and not _is_number(most):
        _refuse(where, f"`max_new_tokens` must be a number (found: {most!r})")
    places = said[len(said) - len(answers) :]
    return tuple(_collected(answer, place, most, where) for answer, place in zip(answers, places, strict=True))


def _collected(answer: Any, place: int, most: int | None, where: str) -> Recorded:
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or not all(_is_number(token) for token in ids):
        _refuse(where, "every entry of `answers` needs `output_ids`, a list of token ids")
    if answer.get("finish") != STOPPED:
        return Recorded(place, tuple(ids), len(ids))
    if most is not None and most < len(ids):
        _refuse(where, f"an answer is {len(ids)} tokens long, and `max_new_tokens` is {most}")
    return Recorded(place, tuple(ids), most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of_answer_file(row: dict[str, Any], where: str, prompts: Mapping[str, Prompt] | None) -> Trace:
    if prompts is None:
        raise RecordError(
            f"{where} holds answers without their questions, as Spec-Bench writes them: name the questions with "
            "--questions FILE"
        )
    name = str(row.get("question_id"))
    if name not in prompts:
        raise RecordError(
            f"{where} answers question {name}, which the file of questions lacks: name the file of these questions"
        )
    question = prompts[name]
    turns = [*(message["content"] for message in question.messages), *question.later_turns]
    try:
        said = turns_of(row["choices"])
    except ValueError as fault:
        _refuse(where, str(fault))
    if len(said) > len(turns):
        _refuse(where, f"{len(said)} answers to a question of {len(turns)} turns")
    messages: list[Message] = []
    for turn, answer in zip(turns, said, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    category = question.category or _category(row)
    return Trace(name, category, tuple(messages), _of_chat(messages), where)


def _refuse(where: str, fault: str) -> NoReturn:
    raise RecordError(f"{where}: {fault}: correct or remove it")
