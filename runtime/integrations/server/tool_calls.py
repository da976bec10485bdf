"""Splits the text of an answer into plain text, reasoning and tool calls, using transformers' response parser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from hdtool.runtime.generation.stop_strings import partial_stop_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPENING, THINK_CLOSING = "<think>", "</think>"
CALL_OPENING, CALL_CLOSING = "<tool_call>", "</tool_call>"
"""Marks of a call in the notation of Hermes and Qwen."""
LINE_END = "\n"


class ThinkingPlace(Enum):
    START = "start"
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkingReader:
    """Splits the text of an answer into plain text and reasoning while it is generated.

    The tags ``<think>`` and ``</think>`` and the line breaks next to them are removed. An opening tag after the
    beginning of the answer is plain text.
    """

    def __init__(self, prompt: str) -> None:
        """Expect reasoning first if ``prompt`` ends with ``<think>``, and plain text if it ends with ``</think>``."""
        end = prompt.rstrip()
        self._place = ThinkingPlace.START
        if end.endswith(THINK_OPENING):
            self._place = ThinkingPlace.THINKING
        elif end.endswith(THINK_CLOSING):
            self._place = ThinkingPlace.ANSWER
        self._held = ""
        self._skips_lines = self._place is ThinkingPlace.THINKING

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> ThinkingReader | None:
        """Return a reader for an answer to ``prompt``; None if the chat template does not contain ``</think>``."""
        return cls(prompt) if THINK_CLOSING in str(getattr(tokenizer, "chat_template", "")) else None

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Add text; return the plain text and the reasoning that can now be emitted, as ``(text, reasoning)``."""
        self._held += text
        reasoning = ""
        if self._place is ThinkingPlace.START:
            self._read_start(is_last=is_last)
        if self._place is ThinkingPlace.THINKING:
            reasoning = self._read_thinking(is_last=is_last)
        return (self._taken(len(self._held)) if self._place is ThinkingPlace.ANSWER else ""), reasoning

    def _read_start(self, *, is_last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK_OPENING):
            self._held, self._place, self._skips_lines = begun.removeprefix(THINK_OPENING), ThinkingPlace.THINKING, True
        elif is_last or not THINK_OPENING.startswith(begun):
            self._place = ThinkingPlace.ANSWER

    def _read_thinking(self, *, is_last: bool) -> str:
        thought, closing, rest = self._held.partition(THINK_CLOSING)
        if closing:
            self._held = thought.rstrip(LINE_END)
            reasoning = self._taken(len(self._held))
            self._held, self._place, self._skips_lines = rest, ThinkingPlace.ANSWER, True
            return reasoning
        if is_last:
            return self._taken(len(self._held))
        shown = self._held[: len(self._held) - partial_stop_length(self._held, (THINK_CLOSING,))]
        return self._taken(len(shown.rstrip(LINE_END)))

    def _taken(self, length: int) -> str:
        """Take the first ``length`` characters of the held text, and omit line breaks that directly follow a tag."""
        taken, self._held = self._held[:length], self._held[length:]
        if self._skips_lines:
            taken = taken.lstrip(LINE_END)
            self._skips_lines = not taken
        return taken


MARKED, UNMARKED = "tool_calls", "unmarked_calls"
"""Names of the fields with calls in response templates of hdtool."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that response templates use for the field with the reasoning."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """Arguments as JSON text, normally an object."""


@dataclass(frozen=True)
class CallNotation:
    """How a family of models writes tool calls."""

    marker: str
    """Text by which the family's chat templates are recognized."""
    opening: str
    """Text that begins a call; it is restored to the plain text if what follows is no call."""
    field: dict[str, Any]
    """Field for the calls in a response template of ``transformers``."""


_JSON = {"content": "json", "content_args": {"allow_non_json": True}}
CALL_NOTATIONS = (
    CallNotation(
        "<function=",
        "<tool_call>",
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    ),
    CallNotation(
        CALL_OPENING,
        CALL_OPENING,
        {"open_pattern": rf"\s*{CALL_OPENING}", "close_pattern": rf"{CALL_CLOSING}\s*", "repeats": True, **_JSON},
    ),
    CallNotation("[TOOL_CALLS]", "[TOOL_CALLS]", {"open": "[TOOL_CALLS]", **_JSON}),
    CallNotation("<|python_tag|>", "", {"open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"(?:name|type)"\s*:)', **_JSON}),
)
"""Notations of Qwen 3.5 and Qwen Coder, Hermes and Qwen, Mistral, and Llama 3; the first matching marker decides."""


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def unmarked_call(names: Iterable[str]) -> str:
    """Return a regular expression that matches the beginning of a call to one of these functions, up to its arguments.

    Qwen2.5-Coder and others write calls without marks, or as a code block.
    """
    escaped = (re.escape(json_text(name)).replace("/", r"\/") for name in names)
    return rf'\{{\s*"name"\s*:\s*(?:{"|".join(escaped)})\s*,\s*"arguments"\s*:'


FENCE = "```"
_OPENING_FENCE = rf"\s*(?:{FENCE}(?:json)?\s*)?"
_LONGEST_TOKEN = len("-Infinity")
_DECODER = json.JSONDecoder()
Parts = tuple[str, str, list["ToolCall"]]
"""Plain text, reasoning and tool calls."""


def _unmarked_field(names: Sequence[str]) -> dict[str, Any]:
    """Return a response template's field that begins at an unmarked call, or at white space and a fence before it."""
    return {"open_pattern": f"(?={_OPENING_FENCE}{unmarked_call(names)})", "content": "text"}


def _read_unmarked(text: str, *, is_last: bool) -> tuple[list[ToolCall], str] | None:
    """Return the unmarked call at the beginning of a text, and the rest of the text.

    A call must be a whole code block, or end the answer. Return ``([], text)`` if there is no call, and None if that
    depends on further text.
    """
    opening = re.match(_OPENING_FENCE, text)
    assert opening
    try:
        value, end = _DECODER.raw_decode(text, opening.end())
    except json.JSONDecodeError as error:
        is_open = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_TOKEN
        return None if is_open and not is_last else ([], text)
    except RecursionError:
        return [], text
    closing = text[end:].lstrip()
    is_block = FENCE in opening[0] and closing.startswith(FENCE)
    rest = closing.removeprefix(FENCE).lstrip() if is_block else closing
    if not is_last and (not rest or FENCE.startswith(rest)):
        return None
    calls = calls_of(value) if is_block or not rest else []
    return (calls, rest) if calls else ([], text)


class ToolCallReader:
    """Splits the text of an answer into plain text, reasoning and tool calls while it is generated."""

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]], prompt: str, *, is_generic: bool
    ) -> ToolCallReader | None:
        """Return a reader; None if there are no tools and the tokenizer has no response template."""
        if not tools and not getattr(tokenizer, "response_template", None):
            return None
        return cls(tokenizer, tools, prompt, is_generic=is_generic)

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]],
        prompt: str,
        *,
        is_generic: bool = False,
    ) -> None:
        """With ``is_generic``, calls are between ``CALL_OPENING`` and ``CALL_CLOSING``, whatever the tokenizer says."""
        response_template = None if is_generic else getattr(tokenizer, "response_template", None)
        self.reads_thinking = response_template is not None
        """True if the tokenizer has a response template, which also describes the reasoning."""
        self._takes_calls = bool(tools)
        self._opening = self._unread = self._unmarked = ""
        marker = CALL_OPENING if is_generic else str(getattr(tokenizer, "chat_template", ""))
        names = [tool["function"]["name"] for tool in tools]
        self._template: dict[str, Any] = response_template or self._fallback(marker, names)
        prefix = prompt if response_template else ""
        self._new_parser = partial(tokenizer.get_response_parser, prefix=prefix, tools=list(tools))
        self._parser = self._new_parser(self._template) if self._template else None

    def _fallback(self, chat_template: str, names: Sequence[str]) -> dict[str, Any]:
        for notation in CALL_NOTATIONS:
            if notation.marker in chat_template:
                self._opening = notation.opening
                fields = {MARKED: notation.field, "content": {"content": "text"}}
                if notation.marker == CALL_OPENING and names:
                    fields[UNMARKED] = _unmarked_field(names)
                return {"start_anchor_pattern": "^", "fields": fields}
        return {}

    def add(self, text: str) -> Parts:
        """Add text; return the text, reasoning and calls that can now be emitted, as ``(text, reasoning, calls)``."""
        if self._parser is None:
            return text, "", []
        try:
            parts = self._read(self._parser.feed(text))
        except (ValueError, RecursionError):  # the answer does not follow the template, so the rest is plain text
            self._parser = None
            return self._unmarked + self._unread + text, "", []
        return self._with_unmarked(parts, is_last=False)

    def end(self) -> Parts:
        """End the answer, and return what is left of it as ``(text, reasoning, calls)``, like ``add``."""
        if self._parser is None:
            return "", "", []
        try:
            parts = self._read(self._parser.finalize()[1])
        except (ValueError, RecursionError):
            return self._unmarked + self._unread, "", []
        return self._with_unmarked(parts, is_last=True)

    def _with_unmarked(self, parts: Parts, *, is_last: bool) -> Parts:
        """Add the text withheld for an unmarked call to ``parts``, once it is known whether it is a call.

        If there is none, the rest of the answer has no unmarked calls either.
        """
        found = _read_unmarked(self._unmarked, is_last=is_last) if self._unmarked else None
        if found is None:
            return parts
        calls, rest = found
        self._unmarked = ""
        if not calls:
            del self._template["fields"][UNMARKED]
        self._parser = self._new_parser(self._template)
        parts = _joined((parts[0], parts[1], parts[2] + calls), self.add(rest))
        return _joined(parts, self.end()) if is_last else parts

    def _read(self, events: Sequence[dict[str, Any]]) -> Parts:
        plain, reasoning, calls = "", "", []
        for event in events:
            field, text = event["field"], event.get("text", "")
            if field == UNMARKED:
                self._unmarked += text
            elif event["type"] == "region_chunk" and not event.get("dirty"):
                if field in REASONING_FIELDS:
                    reasoning += text
                else:
                    plain += text
            elif event["type"] == "region_chunk":
                self._unread += text
            elif event["type"] == "region_close":
                self._unread = ""
            if event["type"] == "region_close" and field == MARKED:
                new_calls = calls_of(event["value"]) if self._takes_calls else []
                calls += new_calls
                if not new_calls:
                    value = event["value"]
                    plain += self._opening + (value if isinstance(value, str) else json_text(value))
        return plain, reasoning, calls


def _joined(first: Parts, second: Parts) -> Parts:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


def calls_of(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value describes, or an empty list if it describes something else."""
    calls, parts = [], [value]
    while parts:  # not recursive, as lists may be nested deeply
        part = parts.pop()
        if isinstance(part, list):
            parts += reversed(part)
        elif call := _call_of(part):
            calls.append(call)
    return calls


def _call_of(value: Any) -> ToolCall | None:
    described = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(described, dict) or not isinstance(described.get("name"), str):
        return None
    given = described.get("arguments", described.get("parameters"))
    given = {} if given is None else given
    try:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
        if not isinstance(json.loads(arguments or "{}"), dict):
            return None
    except (ValueError, RecursionError):  # JSON has neither infinities nor NaN
        return None
    return ToolCall(described["name"], arguments)
