"""OpenAI's Responses API, as used by coding agents: converts requests to chat requests and formats the answers.

The server stores no responses, so each request must contain the whole conversation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hdtool.data.chat import encode_text
from hdtool.runtime.integrations.server.answers import Block, BlockKind, Blocks, Change, Event, blocks_of
from hdtool.runtime.integrations.server.formats import Delta, RequestError, Row, TokenLogprobs, logprob_rows
from hdtool.runtime.integrations.server.instructions import PARAGRAPH
from hdtool.runtime.integrations.server.requests import (
    MAX_LOGPROBS,
    UNREADABLE_NOTE,
    UNSUPPORTED_CONTENT,
    Body,
    ChatRequest,
)
from hdtool.runtime.integrations.server.response_tools import (
    CUSTOM,
    ResponseTools,
    custom_arguments,
    function_name,
    input_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH = "/v1/responses"
MEDIA_PARTS = {"input_image": "image", "input_file": "file", "input_audio": "sound"}
CALLS, OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


class Part(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(BaseModel):
    """An item of the input, with the fields of all item types."""

    model_config = ConfigDict(strict=True)
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextSettings(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_obfuscation: Literal[False] | None = None


class TokenCountRequest(Body):
    """The body of ``/v1/responses/input_tokens``: the fields that determine the prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")
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

    def chat(self) -> ChatRequest:
        """Convert the request to a chat request; raise RequestError if it refers to stored state."""
        self._refuse_kept_state()
        return ChatRequest.of(self._chat_fields())

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

    def _chat_fields(self) -> Row:
        return {
            "messages": _messages(self.instructions, self.input),
            "tools": self.offered.functions,
            "tool_choice": self.offered.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _response_format(self.text.format if self.text else None),
        }


class ResponsesRequest(TokenCountRequest):
    """The body of ``/v1/responses``."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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

    def _chat_fields(self) -> Row:
        return super()._chat_fields() | {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "logprobs": True if LOGPROBS in (self.include or ()) else None,
            "top_logprobs": self.top_logprobs,
        }

    @property
    def echoed(self) -> Row:
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


def _messages(instructions: str | None, given: str | list[Item]) -> list[Row]:
    """Convert the input to chat messages.

    Leading system messages are joined, and so are the assistant's reasoning, text and calls if they follow one another
    in this order.
    """
    made: list[Row] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    names: dict[str, str] = {}
    for index, item in enumerate(given):
        where = f"input.{index}"
        if item.type == "message" and item.role:
            role = "system" if item.role == "developer" else item.role
            _add_message(made, role, _text(item.content, where))
        elif item.type == "reasoning":
            if text := _text(item.content or item.summary, where):
                made.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif item.type in CALLS and item.name and item.call_id:
            names[item.call_id] = function_name(item.name, item.namespace)
            is_custom = item.type.startswith(CUSTOM)
            arguments = custom_arguments(item.input or "") if is_custom else item.arguments or "{}"
            _add_call(made, {"id": item.call_id, "function": {"name": names[item.call_id], "arguments": arguments}})
        elif item.type in OUTPUTS and item.call_id:
            message = {"role": "tool", "content": _output(item.output, where), "tool_call_id": item.call_id}
            made.append(message | ({"name": names[item.call_id]} if item.call_id in names else {}))
        else:
            raise _unknown(item, where)
    if not made:
        raise RequestError("input: it holds no items: send a message", param="input")
    return made


def _add_message(made: list[Row], role: str, text: str) -> None:
    last = made[-1] if made else {}
    if role == "system" and all(message["role"] == "system" for message in made) and made:
        last["content"] += PARAGRAPH + text
    elif role == "assistant" and last.get("reasoning_content") and not last["content"] and "tool_calls" not in last:
        last["content"] = text
    else:
        made.append({"role": role, "content": text})


def _add_call(made: list[Row], call: Row) -> None:
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    made[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | list[Part] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS or (part.text is None and part.refusal is None):
            raise RequestError(
                f"{where}.content.{index}: this server takes text only, and this part is of type {part.type[:40]!r}",
                param=f"{where}.content.{index}",
                code=UNSUPPORTED_CONTENT,
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _output(output: str | list[Part] | None, where: str) -> str:
    """Return the text of a tool result, with a note in place of each image, file or sound."""
    if not isinstance(output, list):
        return output or ""
    notes = [
        Part(type="text", text=UNREADABLE_NOTE.format(MEDIA_PARTS[part.type])) if part.type in MEDIA_PARTS else part
        for part in output
    ]
    return _text(notes, where)


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


def _response_format(form: TextFormat | None) -> Row | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


class ResponsesFormat:
    """Formats an answer as a response or as the events that stream it."""

    last_event: str | None = None

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, body: ResponsesRequest) -> None:
        self._tokenizer, self._tools = tokenizer, body.offered
        made = {"id": _id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._made: Row = made | body.echoed
        self._blocks = Blocks()
        self._ids: dict[Block, Row] = {}
        self._finish: str | None = None
        self._sent = 0

    def whole(self, answers: Sequence[Delta], usage: Row) -> Row:
        (answer,) = answers
        self._finish = answer.finish
        return self._response(self._status, [self._item(block) for block in blocks_of(answer)], usage)

    def opening(self, prompt_tokens: int) -> Iterable[Row]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(IN_PROGRESS, [], None))

    def added(self, index: int, delta: Delta) -> Iterable[Row]:
        self._finish = delta.finish or self._finish
        for event in self._blocks.add(delta):
            yield from self._events(event)

    def closing(self, usage: Row) -> Iterable[Row]:
        for event in self._blocks.close():
            yield from self._events(event)
        response = self._response(self._status, [self._item(block) for block in self._blocks.all], usage)
        yield self._event(f"response.{self._status}", response=response)

    def failed(self, error: RequestError) -> Row:
        return self._event("error", code=error.name, message=str(error), param=error.param)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish == "length" else COMPLETED

    def _response(self, status: str, output: Sequence[Row], usage: Row | None) -> Row:
        return {
            **self._made,
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "output": output,
            "usage": usage and self._usage(usage, output),
        }

    def _usage(self, usage: Row, output: Sequence[Row]) -> Row:
        thought = "".join(item["content"][0]["text"] for item in output if item["type"] == "reasoning")
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(encode_text(self._tokenizer, thought, special=False))},
            "total_tokens": usage["total_tokens"],
        }

    def _events(self, event: Event) -> Iterator[Row]:
        block = event.block
        at = {"item_id": self._identity(block)["id"], "output_index": block.index}
        if block.kind is BlockKind.CALL:
            return self._call_events(event, at)
        return self._text_events(event, at | {"content_index": 0})

    def _text_events(self, event: Event, at: Row) -> Iterator[Row]:
        block, index = event.block, event.block.index
        name = "response.reasoning_text" if block.kind is BlockKind.REASONING else "response.output_text"
        if event.change is Change.OPENED:
            yield self._event("response.output_item.added", output_index=index, item=self._item(block, IN_PROGRESS))
            yield self._event("response.content_part.added", **at, part=self._part(block))
        elif event.change is Change.ADDED:
            logprobs = {"logprobs": self._logprobs(event.logprobs)} if block.kind is BlockKind.TEXT else {}
            yield self._event(f"{name}.delta", **at, delta=event.text, **logprobs)
        else:
            logprobs = {"logprobs": self._logprobs(block.logprobs)} if block.kind is BlockKind.TEXT else {}
            yield self._event(f"{name}.done", **at, text=block.text, **logprobs)
            yield self._event("response.content_part.done", **at, part=self._part(block))
            yield self._event("response.output_item.done", output_index=index, item=self._item(block))

    def _call_events(self, event: Event, at: Row) -> Iterator[Row]:
        block, text = event.block, event.text or event.block.text
        name, whole = "response.function_call_arguments", {"name": block.name, "arguments": text}
        if self._tools.is_custom(block.name):
            text = input_of(text)
            name, whole = "response.custom_tool_call_input", {"input": text}
        if event.change is Change.OPENED:
            item = self._item(block, IN_PROGRESS)
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        elif event.change is Change.ADDED:
            yield self._event(f"{name}.delta", **at, delta=text)
        else:
            yield self._event(f"{name}.done", **at, **whole)
            yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: Block, status: str = COMPLETED) -> Row:
        made = {**self._identity(block), "status": status}
        if block.kind is BlockKind.CALL:
            return {**made, **self._tools.called(block.name, block.text)}
        content = [] if status == IN_PROGRESS else [self._part(block)]
        if block.kind is BlockKind.REASONING:
            return {**made, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**made, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> Row:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> list[Row]:
        return logprob_rows(self._tokenizer, tokens)

    def _identity(self, block: Block) -> Row:
        if block not in self._ids:
            call = {"call_id": _id("call")} if block.kind is BlockKind.CALL else {}
            self._ids[block] = {"id": _id(PREFIXES[block.kind]), **call}
        return self._ids[block]

    def _event(self, kind: str, **fields: Any) -> Row:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
