"""Anthropic's Messages API, as used by coding agents: converts requests to chat requests and formats the answers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from hdtool.data.errors import ContextError
from hdtool.runtime.integrations.server.answer_sections import (
    Change,
    Event,
    Section,
    SectionKind,
    Sections,
    sections_of,
)
from hdtool.runtime.integrations.server.message_content import (
    MessagePart,
    StrictJson,
    name_results,
    text_of_content,
    text_of_part,
)
from hdtool.runtime.integrations.server.openai_formats import (
    AUTHENTICATION,
    INVALID,
    LENGTH,
    OVERLOADED,
    STOP,
    TOOL_CALLS,
    Delta,
    Format,
    JsonDict,
    RequestError,
)
from hdtool.runtime.integrations.server.openai_requests import MAX_STOPS, ConvertedRequest, SampledRequest
from hdtool.runtime.integrations.server.system_messages import PARAGRAPH
from hdtool.runtime.integrations.server.tool_calls import json_text

PATH = "/v1/messages"
STOP_REASONS = {LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}
ERROR_TYPES = {
    401: AUTHENTICATION,
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: OVERLOADED,
}
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a part of the system prompt that Claude Code adds for Anthropic's billing.

This part contains a number that differs between conversations. At the start of the prompt, the number would prevent any
cache hit, so the part is dropped.
"""


class Block(MessagePart):
    """A content block of a message, with the fields of all block types."""

    media_types: ClassVar = {"image": "image", "document": "document"}
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(StrictJson):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(StrictJson):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceField(StrictJson, extra="forbid"):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictJson):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    """Accepted but ignored: ``max_tokens`` alone limits the answer."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictJson, extra="forbid"):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictJson, extra="forbid"):
    effort: str | None = None
    format: OutputFormat | None = None


class KeptTurns(StrictJson, extra="forbid"):
    type: Literal["thinking_turns", "all"]
    value: int = Field(default=1, ge=1)


class ContextEdit(StrictJson, extra="forbid"):
    """A rule that removes thinking from all but the last ``keep`` turns with thinking; tool results stay."""

    type: Literal["clear_thinking_20251015"]
    keep: KeptTurns | Literal["all"] = KeptTurns(type="thinking_turns")


class ContextManagement(StrictJson, extra="forbid"):
    edits: list[ContextEdit] | None = None

    def apply(self, messages: list[JsonDict]) -> None:
        """Remove thinking from ``messages`` in place; each edit sets how many of the last turns keep theirs."""
        thinking = [message for message in messages if "reasoning_content" in message]
        for edit in self.edits or ():
            if isinstance(edit.keep, KeptTurns) and edit.keep.type != "all":
                for message in thinking[: -edit.keep.value]:
                    message.pop("reasoning_content", None)


class MessagesPrompt(ConvertedRequest):
    """The body of ``/v1/messages/count_tokens``: the fields that determine the prompt."""

    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = Field(None, max_length=0)
    speed: Literal["standard"] | None = None
    betas: list[str] | None = None

    def _chat_fields(self) -> JsonDict:
        if self.messages[-1].role == "assistant":
            last = f"messages.{len(self.messages) - 1}"
            raise RequestError(
                f"{last}: this server does not continue a turn of the assistant: end with one of the user", param=last
            )
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        schema = {"name": "answer", "schema": output.format.schema_} if output.format else None
        messages = list(_messages(self.system, self.messages))
        name_results(messages)
        if self.context_management:
            self.context_management.apply(messages)
        return {
            "messages": messages,
            "tools": [_function(tool, index) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _tool_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "reasoning_effort": output.effort,
            "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
            "chat_template_kwargs": {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else None,
        }


class MessagesRequest(SampledRequest, MessagesPrompt):
    """The body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def _chat_fields(self) -> JsonDict:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "top_k": self.top_k}
        return super()._chat_fields() | self.sampling | own


def _messages(system: str | list[Block] | None, messages: Sequence[Turn]) -> Iterator[JsonDict]:
    if isinstance(system, list):
        system = [block for block in system if not (block.text or "").startswith(BILLING_PREFIX)]
    if system:
        yield {"role": "system", "content": text_of_content(system, "system", joint=PARAGRAPH)}
    for index, message in enumerate(messages):
        where = f"messages.{index}.content"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, where)
        else:
            yield from _others(message.role, message.content, where)


def _assistant(blocks: Sequence[Block], where: str) -> JsonDict:
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{where}.{index}"))
        elif block.type != "redacted_thinking":
            texts.append(text_of_part(block, f"{where}.{index}"))
    made: JsonDict = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        made["reasoning_content"] = "".join(reasoning)
    return made | ({"tool_calls": calls} if calls else {})


def _call(block: Block, where: str) -> JsonDict:
    if not block.id or not block.name:
        raise RequestError(f"{where}: a call needs an id and a name", param=where)
    arguments = json_text(block.input or {})
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _others(role: str, blocks: Sequence[Block], where: str) -> Iterator[JsonDict]:
    """Convert a user or system turn to messages: one per tool result, and one per group of adjacent text blocks."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(text_of_part(block, f"{where}.{index}"))
            continue
        if texts:
            yield {"role": role, "content": PARAGRAPH.join(texts)}
            texts = []
        result = text_of_content(block.content, f"{where}.{index}.content", joint=PARAGRAPH, notes=True)
        made = {"role": "tool", "content": f"Error: {result}" if block.is_error else result}
        yield made | ({"tool_call_id": block.tool_use_id} if block.tool_use_id else {})
    if texts or not blocks:
        yield {"role": role, "content": PARAGRAPH.join(texts)}


def _function(tool: Tool, index: int) -> JsonDict:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise RequestError(
            f"tools.{index}: this server runs no tools, and {tool.name[:60]!r} "
            f"{'has no input_schema' if tool.type in (None, 'custom') else f'is of type {tool.type!r}'}: leave it out, "
            "or describe it by an input_schema",
            param=f"tools.{index}",
        )
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoiceField) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class MessagesFormat(Format):
    """Formats an answer as a message of Anthropic's API, or as the events that stream the message."""

    def __init__(self, model: str, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._made = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "container": None,
        }
        self._sections = Sections()
        self._end: JsonDict = {"stop_reason": None, "stop_sequence": None}

    def whole(self, answers: Sequence[Delta], usage: JsonDict) -> JsonDict:
        (answer,) = answers
        content = [_block(section) for section in sections_of(self._shown(answer))]
        return {**self._made, "content": content, **_end(answer), "usage": _usage(usage)}

    def opening(self, prompt_tokens: int) -> Iterable[JsonDict]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._made, "content": [], **self._end, "usage": usage}}

    def added(self, index: int, delta: Delta) -> Iterable[JsonDict]:
        if delta.finish:
            self._end = _end(delta)
        return [_event(event) for event in self._sections.add(self._shown(delta))]

    def closing(self, usage: JsonDict) -> Iterable[JsonDict]:
        yield from map(_event, self._sections.close())
        yield {"type": "message_delta", "delta": self._end, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> JsonDict:
        return error_body(error)

    def _shown(self, delta: Delta) -> Delta:
        return delta if self._shows_thinking else replace(delta, reasoning="")


def too_long(error: ContextError) -> str:
    """Return the error text for an overlong prompt; Claude Code parses the token counts in it to compact the chat."""
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum: {error.advice}"


def error_body(error: RequestError) -> JsonDict:
    """Return the body of an error response in the form of Anthropic's API."""
    kind = ERROR_TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _end(delta: Delta) -> JsonDict:
    if delta.finish == STOP and delta.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_text}
    return {"stop_reason": STOP_REASONS.get(delta.finish or "", "end_turn"), "stop_sequence": None}


def _usage(usage: JsonDict) -> JsonDict:
    """Convert the token counts to this API's fields; ``input_tokens`` excludes cached tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _block(section: Section, *, is_empty: bool = False) -> JsonDict:
    text = "" if is_empty else section.text
    if section.kind is SectionKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if section.kind is SectionKind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    given = {} if is_empty else _arguments(text)
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": section.name, "input": given}


def _arguments(text: str) -> Any:
    """Parse the arguments of a call; return a value that isn't a JSON object as ``{"arguments": value}``."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # ``loads`` takes NaN and numbers that overflow
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _event(event: Event) -> JsonDict:
    index = event.section.index
    if event.change is Change.OPENED:
        return {"type": "content_block_start", "index": index, "content_block": _block(event.section, is_empty=True)}
    if event.change is Change.CLOSED:
        return {"type": "content_block_stop", "index": index}
    if event.section.kind is SectionKind.REASONING:
        delta = {"type": "thinking_delta", "thinking": event.text}
    elif event.section.kind is SectionKind.TEXT:
        delta = {"type": "text_delta", "text": event.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": json_text(_arguments(event.text))}
    return {"type": "content_block_delta", "index": index, "delta": delta}
