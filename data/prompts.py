"""Read prompts with their tools, predicted outputs and grammars.

A text file holds one prompt per line. In any other input, a prompt is a conversation up to the last message that the
model did not write, and ``turns`` of Spec-Bench are answered one after another. In a JSON object, ``prediction`` holds
the probable answer, ``json_schema``, ``regex``, ``grammar`` or ``response_format`` constrains the answer, and ``tools``
lists the tools that the chat template presents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hdtool.data.conversation import QUESTIONS, TEXT, USER, Conversation
from hdtool.data.conversation_files import ConversationReader, LocatedConversation
from hdtool.data.errors import PromptError, RecordError, lone_surrogate
from hdtool.data.input_files import hub_files, input_errors_as, is_hub_name, read_text
from hdtool.data.record_counts import Tally
from hdtool.data.row_readers import RowError, decode_utf8

MEDIA_TYPES = ("image", "audio", "video", "file", "document")
"""Words that mark the type of a message part as media instead of text."""
TOOL_EXAMPLE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def read_tools(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the tools in a JSON file: a list, or an object with a list ``tools``; raise PromptError if it has none."""
    with input_errors_as(path, PromptError):
        data = path.read_bytes()
    try:
        value = json.loads(decode_utf8(data))
    except (RowError, ValueError, RecursionError) as fault:
        raise PromptError(f"{path} is not a JSON file ({fault}): give a list of tools as {TOOL_EXAMPLE}") from None
    tools = tools_of(value.get("tools") if isinstance(value, dict) else value, str(path))
    if not tools:
        raise PromptError(f"{path} holds no tools: give a list of them as {TOOL_EXAMPLE}")
    return tools


def tools_of(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools in a JSON value, none for null; raise PromptError if the value is no list of tools."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(map(_is_tool, value)):
        raise PromptError(f"{where}: `tools` must be a list of {TOOL_EXAMPLE}")
    return tuple(value)


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


CONTENT_TYPE, TEXT_PART_TYPE = "content", "text"
"""Types of a prediction and of its parts in OpenAI's API."""


def read_prediction(path: Path) -> str:
    """Read a predicted output from a text file; raise PromptError if the file is empty or cannot be read."""
    text = read_text(path, "a prediction is UTF-8 text")
    if not text.strip():
        raise PromptError(f"{path} is empty: put the text in it that the answer will probably have, or leave it out")
    return text


def prediction_of(value: Any, where: str) -> str:
    """Return the text of a prediction: a string, OpenAI's format or null (""); raise PromptError for anything else."""
    if value is None:
        return ""
    if isinstance(value, dict) and value.get("type") == CONTENT_TYPE:
        value = value.get(CONTENT_TYPE)
        if isinstance(value, list) and all(_is_part(part) for part in value):
            value = "".join(part[TEXT_PART_TYPE] for part in value)
    if not isinstance(value, str):
        raise PromptError(
            f'{where}: `prediction` must be a text or {{"type": "content", "content": ...}} with a text or text parts'
        )
    if not value.strip():
        raise PromptError(f"{where}: `prediction` is empty: leave it out")
    if fault := lone_surrogate(value):
        raise PromptError(f"{where}: `prediction` is not valid Unicode ({fault}): give it as UTF-8 text")
    return value


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == TEXT_PART_TYPE and isinstance(part.get(TEXT_PART_TYPE), str)


RESPONSE_FORMAT = "response_format"
MAX_GRAMMAR_CHARACTERS = 1 << 20
"""Maximum number of characters of a grammar. Larger grammars take minutes to compile."""


class GrammarKind(StrEnum):
    """Notation of a grammar. Each value is also the name of an option and of a key in prompts files."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"

    @property
    def label(self) -> str:
        """Name of the notation, for messages to the user."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.value, self.value)


@dataclass(frozen=True)
class Grammar:
    """Grammar that the whole answer must match."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        name = f"the {self.kind.label}"
        if not self.text.strip():
            raise PromptError(f"{name} is empty: leave it out for free text")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise PromptError(f"{name} has {len(self.text):,} characters: {MAX_GRAMMAR_CHARACTERS:,} are the most")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Create a grammar of the JSON valid under ``schema``; raise PromptError unless it is an object or boolean."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise PromptError(f"the JSON schema is not valid JSON ({error}): correct it") from None
        if not isinstance(parsed, Mapping | bool):
            raise PromptError(f"the JSON schema is {type(parsed).__name__}: a schema is an object, true or false")
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Create a grammar that accepts the texts that a regular expression matches from start to end."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def of(cls, text: str) -> Grammar:
        """Create a context-free grammar in Lark's notation or in llama.cpp's GBNF."""
        return cls(GrammarKind.GRAMMAR, text)


def read_grammar(kind: GrammarKind, path: Path) -> Grammar:
    """Read a grammar from a file; raise PromptError if the file cannot be read or holds none."""
    text = read_text(path, "give it as UTF-8 text")
    try:
        return Grammar.json_schema(text) if kind is GrammarKind.JSON_SCHEMA else Grammar(kind, text)
    except PromptError as error:
        raise PromptError(f"{path}: {error}") from None


def grammar_of(row: Mapping[str, Any], where: str) -> Grammar | None:
    """Return the grammar in a row of a prompts file, or None if the row has none.

    The grammar is given under the key of a ``GrammarKind`` or as OpenAI's ``response_format``. Raise PromptError if
    several are given or one is invalid.
    """
    kinds = [kind for kind in GrammarKind if row.get(kind.value) is not None]
    response_format = _response_format_grammar(row.get(RESPONSE_FORMAT), where)
    if len(kinds) + (response_format is not None) > 1:
        names = [kind.value for kind in kinds] + [RESPONSE_FORMAT] * (response_format is not None)
        raise PromptError(f"{where}: {' and '.join(names)} exclude each other: give one of them")
    if not kinds:
        return response_format
    (kind,) = kinds
    value = row[kind.value]
    try:
        if kind is GrammarKind.JSON_SCHEMA:
            return Grammar.json_schema(value)
        if not isinstance(value, str):
            raise PromptError(f"`{kind.value}` must be a text, got {type(value).__name__}")
        return Grammar(kind, value)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None


def _response_format_grammar(value: Any, where: str) -> Grammar | None:
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return Grammar.json_schema({"type": "object"})
    described = value.get("json_schema") if isinstance(value, dict) and value.get("type") == "json_schema" else None
    if not isinstance(described, dict) or "schema" not in described:
        raise PromptError(
            f'{where}: `{RESPONSE_FORMAT}` must be {{"type": "json_object"}} or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        )
    return Grammar.json_schema(described["schema"])


Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """Conversation to answer, and the user's later turns."""

    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    id: str = ""
    category: str = ""
    prediction: str = ""
    """Probable text of the first answer, from which hdtool drafts; it is not part of the prompt."""
    grammar: Grammar | None = None
    """Grammar that each answer must match."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, in the format of OpenAI's API. The chat template presents them."""

    @classmethod
    def from_text(cls, text: str, *, id: str = "", where: str = "the prompt") -> Prompt:
        if not text.strip():
            raise PromptError(f"{where} is empty: give some text to answer")
        return cls(messages=({"role": "user", "content": text},), id=id)

    def conversation(self, answers: Sequence[str]) -> list[Message]:
        """Return the messages, then these answers, each followed by the user's next turn if there is one."""
        messages = [dict(message) for message in self.messages]
        for answer, turn in zip_longest(answers, self.later_turns[: len(answers)]):
            messages.append({"role": "assistant", "content": answer})
            if turn is not None:
                messages.append({"role": "user", "content": turn})
        return messages


def read_prompts(path: Path, *, tolerance: float | None = None, tally: Tally | None = None) -> list[Prompt]:
    """Read all prompts in a file or in a data set on the hub.

    Without ``tolerance``, the first unusable row raises PromptError. With it, unusable rows are counted in ``tally``,
    and PromptError is raised if their share exceeds ``tolerance``.
    """
    try:
        return _prompts(path, tolerance, tally)
    except RecordError as error:
        raise PromptError(str(error)) from None


def _prompts(path: Path, tolerance: float | None, tally: Tally | None) -> list[Prompt]:
    paths = hub_files(str(path)) if is_hub_name(str(path)) else [path]
    reader = ConversationReader(paths, text_lines=True)
    prompts: list[Prompt] = []
    for located in (located for source in range(len(paths)) for located in reader.read_input(source)):
        try:
            prompts.append(_prompt_of(located))
        except RowError as fault:
            reader.tally.refuse(located.where, fault)
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
        raise PromptError(f"{tally.messages[0]}: correct or remove it")


def interleave_categories(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Return at most ``limit`` prompts: the first of every category, then the second of every category, and so on."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return interleave(groups.values())[:limit]


def interleave(groups: Iterable[Sequence[Prompt]]) -> list[Prompt]:
    """Return the first prompt of every group, then the second of every group, and so on."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


def _prompt_of(located: LocatedConversation) -> Prompt:
    conversation, where = located.conversation, located.where
    messages, later = _split_at_last_question(conversation)
    _require_text(located.row.value)
    row = located.row.value if isinstance(located.row.value, dict) else {}
    return Prompt(
        messages,
        later,
        id=conversation.id or str(located.row.number),
        category=conversation.category,
        prediction=prediction_of(row.get("prediction"), where),
        grammar=grammar_of(row, where),
        tools=tools_of(row.get("tools"), where),
    )


def _require_text(row: Any) -> None:
    """Raise RowError if a message has an image, audio, video or file part, which the model would not see."""
    messages = row.get("messages") if isinstance(row, dict) else None
    messages = messages if isinstance(messages, list) else ()
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    for part in (part for content in contents if isinstance(content, list) for part in content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(media in kind for media in MEDIA_TYPES):
            raise RowError(f"a message has a part of type {kind[:40]!r}, and hdtool answers text only")


def _split_at_last_question(conversation: Conversation) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Return ``(messages, later_turns)``: the messages to answer first, and the user's turns to answer after that.

    Recorded answers to the last question are left out. Raise RowError if there are only answers.
    """
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


MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench combines into one task."""
POOLED_TASK = "mt_bench"


def tasks_of(categories: Sequence[str]) -> list[str]:
    """Return each question's task: its category, or ``POOLED_TASK`` for MT-Bench's categories if there are several."""
    # Questions with only one of MT-Bench's categories, such as `math`, are not MT-Bench.
    pooled = len(set(categories) & set(MT_BENCH)) > 1
    return [POOLED_TASK if pooled and category in MT_BENCH else category for category in categories]


def interleave_tasks(prompts: Sequence[Prompt], per_task: int) -> list[Prompt]:
    """Return up to ``per_task`` prompts per task, alternating between tasks and, within a task, between categories."""
    groups: dict[str, list[Prompt]] = {}
    for task, prompt in zip(tasks_of([prompt.category for prompt in prompts]), prompts, strict=True):
        groups.setdefault(task, []).append(prompt)
    return interleave(interleave_categories(group, per_task) for group in groups.values())
