"""Request bodies of OpenAI's chat and completion APIs, and the conversion of Responses API tools to functions.

A custom tool, whose input is text, becomes a function with this text as its only parameter. The names of functions in a
namespace begin with the name of the namespace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hdtool.data.prompts import Grammar
from hdtool.runtime.integrations.server.formats import RequestError, Row

MAX_CHOICES, MAX_STOPS, MAX_LOGPROBS, MAX_PROMPTS = 16, 16, 20, 64
TEXT = "text"
UNSUPPORTED_CONTENT = "unsupported_content"
UNREADABLE_NOTE = "[{}: left out, because this model reads text only]"
"""Text that replaces an image in a tool result; images from users are refused."""
TOOL_CHOICE_FORMS = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Body(BaseModel):
    """Base class of request bodies."""

    model_config = ConfigDict(strict=True)
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
        """Make a request from parsed fields, ignoring those that are None."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _wrong_field(error) from None


class GenerationRequest(Body):
    """The fields that chat and text completions share."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Any = None
    response_format: Any = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None

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


class Part(BaseModel):
    """A part of a message; parts of any type but ``text`` are refused later, with a clear error."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str | None = None


class Call(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return (
            "".join(part.text or "" for part in self.content) if isinstance(self.content, list) else self.content or ""
        )


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

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


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
    """Convert messages for the chat template: contents become text, and arguments of tool calls become objects."""
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: a message needs a content", param=f"{where}.content")
    _require_text(message, where)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return made


def _require_text(message: ChatMessage, where: str) -> None:
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type != TEXT:
            raise RequestError(
                f"this server answers text only, and part {index + 1} of {where} is of type {part.type[:40]!r}: leave "
                "it out, or describe it in a part of type 'text'",
                param=f"{where}.content.{index}.type",
                code=UNSUPPORTED_CONTENT,
            )
        if part.text is None:
            raise RequestError(f"part {index + 1} of {where} has no text", param=f"{where}.content.{index}.text")


def require_text_answers(request: ChatRequest) -> None:
    """Raise RequestError if ``modalities`` or ``audio`` ask for anything but text."""
    modality = next((kind for kind in request.modalities or () if kind != TEXT), None)
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
        raise RequestError(
            f"{where}: the arguments of the call of {call.function.name} are not JSON", param=f"{where}.tool_calls"
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """The tools that are presented to the model; if it must call one, also the grammar of the calls."""

    tools: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None
    """Grammar of a JSON array of calls; None if the model decides whether to call a function."""
    max_calls: int | None = None
    """Maximum number of calls in one answer; None for no limit."""

    @classmethod
    def of(cls, choice: Any, tools: Sequence[dict[str, Any]], *, parallel: bool) -> ToolChoice:
        """Parse a ``tool_choice``; ``parallel`` allows several calls in one answer."""
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
            return cls(tuple(tools), _calls_of(tools, max_calls), max_calls)
        named = choice.get("function", {}) if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(named, dict):
            raise RequestError(TOOL_CHOICE_FORMS, param="tool_choice")
        wanted = [tool for tool in tools if tool["function"]["name"] == named.get("name")]
        if not wanted:
            raise RequestError(f"tool_choice names no function of tools: {TOOL_CHOICE_FORMS}", param="tool_choice")
        return cls(tuple(tools), _calls_of(wanted, max_calls=1), max_calls=1)


NO_TOOLS = ToolChoice()


def _calls_of(tools: Sequence[dict[str, Any]], max_calls: int | None) -> Grammar:
    """Return the grammar of JSON arrays with one to ``max_calls`` calls of the given functions."""
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object"}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    return Grammar.json_schema(array | ({"maxItems": max_calls} if max_calls else {}))


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


FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
BUILT_IN_TOOLS = ("web_search", "web_search_preview", "image_generation")
"""Tools that OpenAI's servers run and that agents offer in every request; they are ignored."""
INPUT_FIELD = "input"
NAMESPACE_SEPARATOR = "__"


@dataclass(frozen=True)
class ResponseTool:
    type: str
    name: str
    namespace: str | None
    function: Row
    """Description of the function for the chat template."""


class ResponseTools:
    """The tools of one request to the Responses API, converted to functions."""

    def __init__(self, tools: Sequence[Row] | None) -> None:
        """Raise RequestError for a tool that the model cannot call, or if there are only built-in tools."""
        given = list(tools or ())
        left_out = [tool for tool in given if tool.get("type") in BUILT_IN_TOOLS]
        self.presented: list[Row] = [tool for tool in given if tool not in left_out]
        """Tools as in the request, without the built-in ones."""
        if left_out and not self.presented:
            raise _not_run(left_out[0], f"tools.{given.index(left_out[0])}")
        self._by_name: dict[str, ResponseTool] = {}
        for index, tool in enumerate(given):
            if tool in self.presented:
                for response_tool in _tools_of(tool, f"tools.{index}"):
                    self._by_name[response_tool.function["name"]] = response_tool

    @property
    def functions(self) -> list[Row] | None:
        return [{"type": FUNCTION, "function": tool.function} for tool in self._by_name.values()] or None

    def choice(self, choice: Any) -> Any:
        """Convert a ``tool_choice`` to the form that chat requests use."""
        if isinstance(choice, dict) and choice.get("type") in (FUNCTION, CUSTOM):
            return {"type": FUNCTION, "function": {"name": function_name(choice.get("name"), choice.get(NAMESPACE))}}
        return choice

    def is_custom(self, function: str) -> bool:
        return function in self._by_name and self._by_name[function].type == CUSTOM

    def called(self, function: str, arguments: str) -> Row:
        """Return the fields of a call's output item that depend on the type and namespace of the tool."""
        tool = self._by_name.get(function)
        name = {"name": tool.name if tool else function}
        if tool and tool.namespace:
            name["namespace"] = tool.namespace
        if self.is_custom(function):
            return {"type": "custom_tool_call", **name, "input": input_of(arguments)}
        return {"type": "function_call", **name, "arguments": arguments}


def function_name(name: Any, namespace: Any = None) -> Any:
    """Return the name under which a tool is presented to the model."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """Wrap a custom tool's input in the JSON arguments of the function that represents the tool."""
    return json.dumps({INPUT_FIELD: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Extract a custom tool's input from its function's ``arguments``; if they are malformed, return ``arguments``."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT_FIELD) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _tools_of(tool: Row, where: str, namespace: Row | None = None) -> Iterator[ResponseTool]:
    kind, name = tool.get("type"), tool.get("name")
    if kind in (FUNCTION, CUSTOM, NAMESPACE) and not isinstance(name, str):
        raise RequestError(
            f"{where}: a tool has its name beside its type, and a function its parameters", param=f"{where}.name"
        )
    if kind == NAMESPACE and namespace is None:
        members = tool.get("tools")
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise RequestError(f"{where}: a namespace holds a list of tools", param=f"{where}.tools")
        for index, member in enumerate(members):
            yield from _tools_of(member, f"{where}.tools.{index}", tool)
        return
    if kind not in (FUNCTION, CUSTOM):
        raise _not_run(tool, where)
    group = namespace["name"] if namespace else None
    described = [namespace.get("description") if namespace else None, tool.get("description")]
    if kind == CUSTOM:
        parameters: Any = {"type": "object", "properties": {INPUT_FIELD: {"type": "string"}}, "required": [INPUT_FIELD]}
        described.append(_form(tool.get("format")))
    else:
        parameters = tool.get("parameters")
    function = {
        "name": function_name(name, group),
        "description": "\n\n".join(text for text in described if isinstance(text, str) and text),
        "parameters": parameters,
        "strict": tool.get("strict"),
    }
    shown = {key: value for key, value in function.items() if value not in (None, "")}
    yield ResponseTool(str(kind), str(name), group, shown)


def _form(form: Any) -> str | None:
    """Return text that tells the model the grammar of a custom tool's input; None if there is no grammar."""
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    return f"The input matches this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"


def _not_run(tool: Row, where: str) -> RequestError:
    return RequestError(
        f"{where}: this server runs no tools, and this one is of type {str(tool.get('type'))[:40]!r}: send functions "
        "with a name and parameters, or custom tools",
        param=where,
    )
