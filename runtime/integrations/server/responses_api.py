"""OpenAI's Responses API, as used by coding agents: converts requests to chat requests and formats the answers.

The server stores no responses, so each request must contain the whole conversation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hdtool.data.chat import encode_text
from hdtool.runtime.integrations.server.answer_sections import (
    Change,
    Event,
    Section,
    SectionKind,
    Sections,
    sections_of,
)
from hdtool.runtime.integrations.server.message_content import (
    UNSUPPORTED_CONTENT,
    MessagePart,
    StrictJson,
    name_results,
    text_of_content,
)
from hdtool.runtime.integrations.server.openai_formats import (
    LENGTH,
    Delta,
    Format,
    JsonDict,
    RequestError,
    TokenLogprobs,
    logprob_rows,
)
from hdtool.runtime.integrations.server.openai_requests import MAX_LOGPROBS, ConvertedRequest, SampledRequest
from hdtool.runtime.integrations.server.response_tools import (
    CUSTOM,
    ResponseTools,
    custom_arguments,
    function_name,
    input_of,
)
from hdtool.runtime.integrations.server.system_messages import PARAGRAPH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH = "/v1/responses"
CALLS, OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
LOGPROBS = "message.output_text.logprobs"
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
PREFIXES = {SectionKind.REASONING: "rs", SectionKind.TEXT: "msg", SectionKind.CALL: "fc"}
STREAMED = {
    SectionKind.REASONING: ("reasoning_text", "text"),
    SectionKind.TEXT: ("output_text", "text"),
    SectionKind.CALL: ("function_call_arguments", "arguments"),
}
"""Name of the events that stream a section, and of the field with its whole text in the last of them."""
CUSTOM_INPUT = ("custom_tool_call_input", "input")
"""Name and field for calls of custom tools, in place of those in ``STREAMED``."""


class ContentPart(MessagePart):
    text_types = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
    media_types: ClassVar = {"input_image": "image", "input_file": "file", "input_audio": "sound"}
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        return self.refusal if self.text is None else self.text


class Item(StrictJson):
    """An item of the input, with the fields of all item types."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class TextFormat(StrictJson):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextSettings(StrictJson, extra="forbid"):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictJson, extra="forbid"):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ObfuscationOption(StrictJson, extra="forbid"):
    include_obfuscation: Literal[False] | None = None


class ResponsesPrompt(ConvertedRequest):
    """The body of ``/v1/responses/input_tokens``: the fields that determine the prompt."""

    input: str | list[Item]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: Any = None
    conversation: Any = None

    @cached_property
    def offered(self) -> ResponseTools:
        """Tools of the request; raises RequestError for a tool that the model cannot call."""
        return ResponseTools(self.tools)

    def _refuse_kept_state(self) -> None:
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name, None) is not None:
                raise RequestError(
                    f"{name}: this server keeps no responses or prompts: send the whole conversation as input",
                    param=name,
                )

    def _chat_fields(self) -> JsonDict:
        self._refuse_kept_state()
        return {
            "messages": _messages(self.instructions, self.input),
            "tools": self.offered.functions,
            "tool_choice": self.offered.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _response_format(self.text.format if self.text else None),
        }


class ResponsesRequest(SampledRequest, ResponsesPrompt):
    """The body of ``/v1/responses``."""

    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: ObfuscationOption | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None

    def _chat_fields(self) -> JsonDict:
        return super()._chat_fields() | {
            **self.sampling,
            "max_tokens": self.max_output_tokens,
            "logprobs": True if LOGPROBS in (self.include or ()) else None,
            "top_logprobs": self.top_logprobs,
        }

    @property
    def echoed(self) -> JsonDict:
        """Request settings that the response repeats."""
        reasoning = self.reasoning or Reasoning()
        form = self.text.format.model_dump(by_alias=True, exclude_none=True) if self.text and self.text.format else None
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "background": False,
            "service_tier": "default",
            "temperature": self.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.offered.presented,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


def _messages(instructions: str | None, given: str | list[Item]) -> list[JsonDict]:
    """Convert the input to chat messages; raise RequestError if it holds an unknown item, or none.

    Leading system messages are joined, and so are the assistant's reasoning, text and calls if they follow one another
    in this order.
    """
    made: list[JsonDict] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        where = f"input.{index}"
        if item.type == "message" and item.role:
            role = "system" if item.role == "developer" else item.role
            _add_message(made, role, text_of_content(item.content, f"{where}.content"))
        elif item.type == "reasoning":
            if text := text_of_content(item.content or item.summary, f"{where}.content"):
                made.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif item.type in CALLS and item.name and item.call_id:
            is_custom = item.type.startswith(CUSTOM)
            arguments = custom_arguments(item.input or "") if is_custom else item.arguments or "{}"
            function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
            _add_call(made, {"id": item.call_id, "function": function})
        elif item.type in OUTPUTS and item.call_id:
            output = text_of_content(item.output, f"{where}.output", notes=True)
            made.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        else:
            raise _unknown(item, where)
    if not made:
        raise RequestError("input: it holds no items: send a message", param="input")
    name_results(made)
    return made


def _add_message(made: list[JsonDict], role: str, text: str) -> None:
    last = made[-1] if made else {}
    if role == "system" and all(message["role"] == "system" for message in made) and made:
        last["content"] += PARAGRAPH + text
    elif role == "assistant" and last.get("reasoning_content") and not last["content"] and "tool_calls" not in last:
        last["content"] = text
    else:
        made.append({"role": role, "content": text})


def _add_call(made: list[JsonDict], call: JsonDict) -> None:
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    made[-1].setdefault("tool_calls", []).append(call)


def _unknown(item: Item, where: str) -> RequestError:
    if item.type in ("message", *CALLS, *OUTPUTS):
        return RequestError(
            f"{where}: an item of type {item.type!r} lacks its role, its name or its call_id", param=where
        )
    return RequestError(
        f"{where}: this server takes messages, reasoning and calls of functions, and this item is of type "
        f"{item.type[:40]!r}: leave it out",
        param=where,
        code=UNSUPPORTED_CONTENT,
    )


def _response_format(form: TextFormat | None) -> JsonDict | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


class ResponsesFormat(Format):
    """Formats an answer as a response of the Responses API, or as the events that stream the response."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, body: ResponsesRequest) -> None:
        self._tokenizer, self._tools = tokenizer, body.offered
        made = {"id": _id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._made: JsonDict = made | body.echoed
        self._sections = Sections()
        self._ids: dict[Section, JsonDict] = {}
        self._finish: str | None = None
        self._sent = 0

    def whole(self, answers: Sequence[Delta], usage: JsonDict) -> JsonDict:
        (answer,) = answers
        self._finish = answer.finish
        return self._response(self._status, [self._item(section) for section in sections_of(answer)], usage)

    def opening(self, prompt_tokens: int) -> Iterable[JsonDict]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(IN_PROGRESS, [], None))

    def added(self, index: int, delta: Delta) -> Iterable[JsonDict]:
        self._finish = delta.finish or self._finish
        for event in self._sections.add(delta):
            yield from self._events(event)

    def closing(self, usage: JsonDict) -> Iterable[JsonDict]:
        for event in self._sections.close():
            yield from self._events(event)
        response = self._response(self._status, [self._item(section) for section in self._sections.all], usage)
        yield self._event(f"response.{self._status}", response=response)

    def failed(self, error: RequestError) -> JsonDict:
        return self._event("error", code=error.name, message=str(error), param=error.param)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish == LENGTH else COMPLETED

    def _response(self, status: str, output: Sequence[JsonDict], usage: JsonDict | None) -> JsonDict:
        return {
            **self._made,
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "output": output,
            "usage": usage and self._usage(usage, output),
        }

    def _usage(self, usage: JsonDict, output: Sequence[JsonDict]) -> JsonDict:
        thought = "".join(item["content"][0]["text"] for item in output if item["type"] == "reasoning")
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(encode_text(self._tokenizer, thought, special=False))},
            "total_tokens": usage["total_tokens"],
        }

    def _events(self, event: Event) -> Iterator[JsonDict]:
        section, is_call = event.section, event.section.kind is SectionKind.CALL
        item_at = {"output_index": section.index}
        at = {"item_id": self._identity(section)["id"], **item_at} | ({} if is_call else {"content_index": 0})
        if event.change is Change.OPENED:
            yield self._event("response.output_item.added", **item_at, item=self._item(section, IN_PROGRESS))
            if not is_call:
                yield self._event("response.content_part.added", **at, part=self._part(section))
            return
        is_custom = is_call and self._tools.is_custom(section.name)
        name, text_field = CUSTOM_INPUT if is_custom else STREAMED[section.kind]
        text, logprobs = (
            (event.text, event.logprobs) if event.change is Change.ADDED else (section.text, section.logprobs)
        )
        text = input_of(text) if is_custom else text
        more: JsonDict = {"logprobs": self._logprobs(logprobs)} if section.kind is SectionKind.TEXT else {}
        if event.change is Change.ADDED:
            yield self._event(f"response.{name}.delta", **at, delta=text, **more)
            return
        more |= {"name": section.name} if is_call and not is_custom else {}
        yield self._event(f"response.{name}.done", **at, **{text_field: text}, **more)
        if not is_call:
            yield self._event("response.content_part.done", **at, part=self._part(section))
        yield self._event("response.output_item.done", **item_at, item=self._item(section))

    def _item(self, section: Section, status: str = COMPLETED) -> JsonDict:
        made = {**self._identity(section), "status": status}
        if section.kind is SectionKind.CALL:
            return {**made, **self._tools.called(section.name, section.text)}
        content = [] if status == IN_PROGRESS else [self._part(section)]
        if section.kind is SectionKind.REASONING:
            return {**made, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**made, "type": "message", "role": "assistant", "content": content}

    def _part(self, section: Section) -> JsonDict:
        if section.kind is SectionKind.REASONING:
            return {"type": "reasoning_text", "text": section.text}
        logprobs = self._logprobs(section.logprobs)
        return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> list[JsonDict]:
        return logprob_rows(self._tokenizer, tokens)

    def _identity(self, section: Section) -> JsonDict:
        if section not in self._ids:
            call = {"call_id": _id("call")} if section.kind is SectionKind.CALL else {}
            self._ids[section] = {"id": _id(PREFIXES[section.kind]), **call}
        return self._ids[section]

    def _event(self, kind: str, **fields: Any) -> JsonDict:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
