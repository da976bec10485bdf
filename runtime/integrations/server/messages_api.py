"""Anthropic's Messages API, as used by coding agents: converts requests to chat requests and formats the answers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hdtool.data.errors import ContextError
from hdtool.runtime.integrations.server.answers import Block, BlockKind, Blocks, Change, Event, blocks_of
from hdtool.runtime.integrations.server.formats import (
    AUTHENTICATION,
    INVALID,
    OVERLOADED,
    Delta,
    RequestError,
    Row,
)
from hdtool.runtime.integrations.server.instructions import PARAGRAPH
from hdtool.runtime.integrations.server.requests import (
    MAX_STOPS,
    UNREADABLE_NOTE,
    UNSUPPORTED_CONTENT,
    Body,
    ChatRequest,
)

PATH = "/v1/messages"
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: AUTHENTICATION,
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: OVERLOADED,
}
MEDIA_PARTS = ("image", "document")
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Prefix of a part of the system prompt that Claude Code adds for Anthropic's billing.

This part contains a number that differs between conversations. At the start of the prompt, the number would prevent any
cache hit, so the part is dropped.
"""


class Part(BaseModel):
    """A content block of a message, with the fields of all block types."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    is_error: bool | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["user", "assistant", "system"]
    content: str | list[Part]


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceField(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    """Accepted but ignored: ``max_tokens`` alone limits the answer."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", serialize_by_alias=True)
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    effort: str | None = None
    format: OutputFormat | None = None


class KeptTurns(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["thinking_turns", "all"]
    value: int = Field(default=1, ge=1)


class ContextEdit(BaseModel):
    """A rule that removes thinking from earlier turns but keeps tool results."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["clear_thinking_20251015"]
    keep: KeptTurns | Literal["all"] = KeptTurns(type="thinking_turns")


class ContextManagement(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    edits: list[ContextEdit] | None = None

    def apply(self, messages: list[Row]) -> None:
        """Remove thinking from ``messages`` in place; each edit sets how many of the last turns keep theirs."""
        thinking = [message for message in messages if "reasoning_content" in message]
        for edit in self.edits or ():
            if isinstance(edit.keep, KeptTurns) and edit.keep.type != "all":
                for message in thinking[: -edit.keep.value]:
                    message.pop("reasoning_content", None)


class TokenCountRequest(Body):
    """The body of ``/v1/messages/count_tokens``: the fields that determine the prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")
    messages: list[Message] = Field(min_length=1)
    system: str | list[Part] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = Field(None, max_length=0)
    speed: Literal["standard"] | None = None
    betas: list[str] | None = None

    def chat(self) -> ChatRequest:
        """Convert the request to a chat request; raise RequestError if it ends with an assistant turn."""
        if self.messages[-1].role == "assistant":
            last = f"messages.{len(self.messages) - 1}"
            raise RequestError(
                f"{last}: this server does not continue a turn of the assistant: end with one of the user", param=last
            )
        return ChatRequest.of(self._chat_fields())

    def _chat_fields(self) -> Row:
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        schema = {"name": "answer", "schema": output.format.schema_} if output.format else None
        messages = list(_messages(self.system, self.messages))
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


class MessagesRequest(TokenCountRequest):
    """The body of ``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def _chat_fields(self) -> Row:
        return super()._chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }


def _messages(system: str | list[Part] | None, messages: Sequence[Message]) -> Iterator[Row]:
    names: dict[str, str] = {}
    if isinstance(system, list):
        system = [part for part in system if not (part.text or "").startswith(BILLING_PREFIX)]
    if system:
        yield {"role": "system", "content": _text(system, "system")}
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, where, names)
        else:
            yield from _others(message.role, message.content, where, names)


def _assistant(parts: Sequence[Part], where: str, names: dict[str, str]) -> Row:
    """Convert an assistant turn to a message; add the name of each called function to ``names``, keyed by call id."""
    texts, reasoning, calls = [], [], []
    for index, part in enumerate(parts):
        if part.type == "text":
            texts.append(part.text or "")
        elif part.type == "thinking":
            reasoning.append(part.thinking or "")
        elif part.type == "tool_use" and part.id and part.name:
            names[part.id] = part.name
            function = {"name": part.name, "arguments": json.dumps(part.input or {}, ensure_ascii=False)}
            calls.append({"id": part.id, "function": function})
        elif part.type != "redacted_thinking":
            raise _unknown(part, f"{where}.content.{index}")
    made: Row = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        made["reasoning_content"] = "".join(reasoning)
    return made | ({"tool_calls": calls} if calls else {})


def _others(role: str, parts: Sequence[Part], where: str, names: dict[str, str]) -> Iterator[Row]:
    """Convert a user or system turn to messages: one per tool result, and one per group of adjacent text blocks."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        if part.type != "tool_result":
            texts.append(_text([part], f"{where}.content.{index}"))
            continue
        if texts:
            yield {"role": role, "content": PARAGRAPH.join(texts)}
            texts = []
        result = _result(part.content or "", f"{where}.content.{index}")
        made = {"role": "tool", "content": f"Error: {result}" if part.is_error else result}
        made |= {"tool_call_id": part.tool_use_id} if part.tool_use_id else {}
        name = names.get(part.tool_use_id or "")
        yield made | ({"name": name} if name else {})
    if texts or not parts:
        yield {"role": role, "content": PARAGRAPH.join(texts)}


def _result(content: str | list[Part], where: str) -> str:
    """Return the text of a tool result, with a note in place of each image or document."""
    if isinstance(content, str):
        return content
    notes = [
        Part(type="text", text=UNREADABLE_NOTE.format(part.type)) if part.type in MEDIA_PARTS else part
        for part in content
    ]
    return _text(notes, where)


def _text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise _unknown(part, where if len(content) == 1 else f"{where}.{index}")
    return PARAGRAPH.join(part.text or "" for part in content)


def _unknown(part: Part, where: str) -> RequestError:
    if part.type in ("text", "tool_use"):
        return RequestError(f"{where}: a part of type {part.type!r} lacks a field", param=where)
    return RequestError(
        f"{where}: this server takes texts and tools only, and this part is of type {part.type[:40]!r}: leave it out",
        param=where,
        code=UNSUPPORTED_CONTENT,
    )


def _function(tool: Tool, index: int) -> Row:
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


class MessagesFormat:
    """Formats an answer as a message or as the events that stream it."""

    last_event: str | None = None

    def __init__(self, model: str, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._made = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "container": None,
        }
        self._blocks = Blocks()
        self._end: Row = {"stop_reason": None, "stop_sequence": None}

    def whole(self, answers: Sequence[Delta], usage: Row) -> Row:
        (answer,) = answers
        content = [_block(block) for block in blocks_of(self._shown(answer))]
        return {**self._made, "content": content, **_end(answer), "usage": _usage(usage)}

    def opening(self, prompt_tokens: int) -> Iterable[Row]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._made, "content": [], **self._end, "usage": usage}}

    def added(self, index: int, delta: Delta) -> Iterable[Row]:
        if delta.finish:
            self._end = _end(delta)
        return [_event(event) for event in self._blocks.add(self._shown(delta))]

    def closing(self, usage: Row) -> Iterable[Row]:
        yield from map(_event, self._blocks.close())
        yield {"type": "message_delta", "delta": self._end, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> Row:
        return error_body(error)

    def _shown(self, delta: Delta) -> Delta:
        return delta if self._shows_thinking else replace(delta, reasoning="")


def too_long(error: ContextError) -> str:
    """Return the error text for an overlong prompt; Claude Code parses the token counts in it to compact the chat."""
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum: {error.advice}"


def error_body(error: RequestError) -> Row:
    """Return the body of an error response."""
    kind = ERROR_TYPES.get(error.status, INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _end(delta: Delta) -> Row:
    if delta.finish == "stop" and delta.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_text}
    return {"stop_reason": STOP_REASONS.get(delta.finish or "", "end_turn"), "stop_sequence": None}


def _usage(usage: Row) -> Row:
    """Convert the token counts to this API's fields; ``input_tokens`` excludes cached tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _block(block: Block, *, is_empty: bool = False) -> Row:
    text = "" if is_empty else block.text
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    given = {} if is_empty else _arguments(text)
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": block.name, "input": given}


def _arguments(text: str) -> Any:
    """Parse the arguments of a call; return a value that isn't a JSON object as ``{"arguments": value}``."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # ``loads`` takes NaN and numbers that overflow
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _event(event: Event) -> Row:
    index = event.block.index
    if event.change is Change.OPENED:
        return {"type": "content_block_start", "index": index, "content_block": _block(event.block, is_empty=True)}
    if event.change is Change.CLOSED:
        return {"type": "content_block_stop", "index": index}
    if event.block.kind is BlockKind.REASONING:
        delta = {"type": "thinking_delta", "thinking": event.text}
    elif event.block.kind is BlockKind.TEXT:
        delta = {"type": "text_delta", "text": event.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": json.dumps(_arguments(event.text), ensure_ascii=False)}
    return {"type": "content_block_delta", "index": index, "delta": delta}
