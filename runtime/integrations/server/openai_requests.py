"""Request bodies of OpenAI's chat and completion APIs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator

from hdtool.data.prompts import Grammar
from hdtool.runtime.integrations.server.call_grammar import array_of_calls, marked_calls
from hdtool.runtime.integrations.server.message_content import (
    UNSUPPORTED_CONTENT,
    MessagePart,
    StrictJson,
    text_of_content,
)
from hdtool.runtime.integrations.server.openai_formats import RequestError
from hdtool.runtime.integrations.server.tool_calls import THINK_OPENING

MAX_CHOICES, MAX_STOPS, MAX_LOGPROBS, MAX_PROMPTS = 16, 16, 20, 64
TOOL_CHOICE_FORMS = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


class UsageOption(StrictJson):
    include_usage: bool | None = None


class Extension(StrictJson):
    """The field ``hdtool`` of a request, with options that OpenAI's API doesn't have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafts: bool = True
    """If False, the answer is decoded without drafts, and the history does not keep it."""
    sources: bool = False
    """Whether to report which source drafted each token."""


NO_EXTENSION = Extension()


class Body(StrictJson):
    """Base class of request bodies."""

    model: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse the JSON body of a request; raise RequestError for the first invalid field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise _wrong_field(error) from None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Make a request from parsed fields, ignoring those that are None; raise RequestError for an invalid one."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _wrong_field(error) from None


class SampledRequest(Body):
    """The fields that requests for answers have in all APIs, under the same names."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


class GenerationRequest(SampledRequest):
    """The fields that chat and text completions share."""

    max_tokens: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream_options: UsageOption | None = None
    prediction: Any = None
    response_format: Any = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    hdtool: Extension = NO_EXTENSION

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MAX_STOPS or not all(texts) or any(len(text) > 1000 for text in texts):
            raise ValueError(f"at most {MAX_STOPS} texts of 1 to 1,000 characters each")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def structure(self) -> dict[str, Any]:
        """Fields that define what the answer must match, without those that are None."""
        names = ("json_schema", "regex", "grammar", "response_format")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CalledFunction(StrictJson):
    name: str
    arguments: str | None = None


class Call(StrictJson):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictJson):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: None = Field(None, description="the former name of tools")
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None

    def chat(self) -> ChatRequest:
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class ConvertedRequest(Body, extra="forbid"):
    """A request of another API that is answered as a chat request."""

    def chat(self) -> ChatRequest:
        """Convert the request to a chat request; raise RequestError if that is not possible."""
        return ChatRequest.of(self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the chat template: contents become text, and arguments of tool calls become objects.

    Raise RequestError for a message without content and calls, with other parts than text, or with invalid arguments.
    """
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: a message needs a content", param=f"{where}.content")
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of_content(message.content, f"{where}.content"),
    }
    kept = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    calls = {"tool_calls": [_call(call, where) for call in message.tool_calls]} if message.tool_calls else {}
    return made | {name: value for name, value in kept.items() if value is not None} | calls


def require_text_answers(request: ChatRequest) -> None:
    """Raise RequestError if ``modalities`` or ``audio`` ask for anything but text."""
    modality = next((kind for kind in request.modalities or () if kind != "text"), None)
    if modality is not None or request.audio is not None:
        raise RequestError(
            f"this server answers text only, and the request asks for {(modality or 'audio')[:40]!r}: leave out "
            f"{'modalities' if modality else 'audio'}",
            param="modalities" if modality else "audio",
            code=UNSUPPORTED_CONTENT,
        )


def _call(call: Call, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}: the arguments of the call of {call.function.name} are no JSON object",
            param=f"{where}.tool_calls",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """The tools that are presented to the model, and which of them it must call, if any."""

    tools: tuple[dict[str, Any], ...] = ()
    required: tuple[dict[str, Any], ...] = ()
    """Tools of which the model must call one; empty if the model decides whether to call a tool."""
    max_calls: int | None = None
    """Maximum number of calls in one answer; None if the request sets no limit."""
    is_generic: bool = False
    """True if tools and calls are text in hdtool's notation, because the chat template presents no tools."""

    @classmethod
    def of(cls, choice: Any, tools: Sequence[dict[str, Any]], *, parallel: bool) -> ToolChoice:
        """Parse a ``tool_choice``, or raise RequestError; ``parallel`` allows several calls in one answer."""
        max_calls = None if parallel else 1
        if not tools:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice needs tools: send them, or leave it out", param="tool_choice")
            return cls()
        if choice == "none":
            return cls()
        if choice in (None, "auto"):
            return cls(tuple(tools), max_calls=max_calls)
        if choice == "required":
            return cls(tuple(tools), tuple(tools), max_calls)
        named = choice.get("function", {}) if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(named, dict):
            raise RequestError(TOOL_CHOICE_FORMS, param="tool_choice")
        wanted = [tool for tool in tools if tool["function"]["name"] == named.get("name")]
        if not wanted:
            raise RequestError(f"tool_choice names no function of tools: {TOOL_CHOICE_FORMS}", param="tool_choice")
        return cls(tuple(tools), tuple(wanted), max_calls=1)

    def grammar(self, prompt: str) -> Grammar | None:
        """Return the grammar that an answer to the rendered ``prompt`` must match; None if any answer is allowed."""
        if self.is_generic:
            is_thinking = prompt.rstrip().endswith(THINK_OPENING)
            is_required = bool(self.required)
            tools = self.required or self.tools
            return marked_calls(tools, self.max_calls, is_required=is_required, is_thinking=is_thinking)
        return array_of_calls(self.required, self.max_calls) if self.required else None


NO_TOOLS = ToolChoice()


def _wrong_field(error: ValidationError) -> RequestError:
    """Return the error for the first invalid field; if the field allows several types, for the best-matching type."""
    errors = error.errors(include_url=False, include_context=False)
    faults = [([part for part in error_detail["loc"] if not _is_branch(part)], error_detail) for error_detail in errors]
    first = faults[0][0][:1]
    path, fault = max(
        (error_detail for error_detail in faults if error_detail[0][:1] == first),
        key=lambda error_detail: len(error_detail[0]),
    )
    location, message = ".".join(map(str, path)), fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "this server does not know the field: leave it out"
    return RequestError(f"{location}: {message}" if location else message, param=location or None)


def _is_branch(part: str | int) -> bool:
    """Return True if a part of an error's location names one of a field's possible types, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "none") or "[" in part)
