"""Requests to the APIs of OpenAI and Anthropic and their responses, as logs and gateways keep them.

A request has ``messages`` (chat), ``prompt`` (completions) or ``input`` (responses). A response has ``choices``,
``output`` or ``content``, or is a list of streamed chunks. Nothing else is read from them, no header and no key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hdtool.data.conversations.conversation import ASSISTANT, SYSTEM, USER, Turn
from hdtool.data.conversations.messages import content_text, message_text, text_in, turns_in
from hdtool.data.formats.row import RowError, parsed

REQUEST_KEYS = ("request", "request_body", "inputs", "input", "kwargs")
RESPONSE_KEYS = ("response", "response_body", "outputs", "output", "completion")
BODY_KEYS = ("body", "json", "json_body")
SYSTEM_KEYS = ("system", "instructions")
DATA = "data:"
"""The start of a line of a streamed response."""


def is_request(value: Any) -> bool:
    return isinstance(value, dict) and (
        "messages" in value or "prompt" in value or isinstance(value.get("input"), str | list)
    )


def is_response(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(chunk, dict) for chunk in value)
    return isinstance(value, dict) and any(
        key in value for key in ("choices", "output", "output_text", "message", "error", "response", "content")
    )


def body_of(value: Any) -> Any:
    """The body of a request or a response, which a log may keep as text and within other fields."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = parsed(value)
    if isinstance(value, dict) and not is_request(value):
        for key in BODY_KEYS:
            if key in value and (isinstance(value[key], dict) or _is_json(value[key])):
                return body_of(value[key])
    return value


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def request_turns(body: dict[str, Any]) -> list[Turn]:
    """The turns of a request."""
    system = next((content_text(body[key]) for key in SYSTEM_KEYS if body.get(key)), "")
    return ([Turn(SYSTEM, system)] if system else []) + _asked(body)


def _asked(body: dict[str, Any]) -> list[Turn]:
    for key in ("messages", "input", "prompt"):
        value = body.get(key)
        if isinstance(value, str) and key != "messages":
            return [Turn(USER, value)]
        if isinstance(value, list) and value and isinstance(value[0], str | int | list):
            if len(value) == 1 and isinstance(value[0], str):
                return [Turn(USER, value[0])]
            raise RowError(
                f"`{key}` is a list of {'texts' if isinstance(value[0], str) else 'token ids'}: give one text"
            )
        if value is not None:
            return turns_in(value, key)
    raise RowError("a request without `messages`, `prompt` or `input`")


def answer_turns(response: Any) -> list[Turn]:
    """The answer of a response: none if the request failed or the response is empty."""
    if isinstance(response, str):
        text = _streamed(response) if response.lstrip().startswith(DATA) else response
        return [Turn(ASSISTANT, text)]
    if isinstance(response, list):
        return _of_list(response)
    if not isinstance(response, dict) or response.get("error"):
        return []
    if isinstance(choices := response.get("choices"), list):
        return _of_choices(choices)
    if isinstance(output := response.get("output"), list):
        return [turn for turn in turns_in(output, "output") if turn.by_model]
    for key in ("output_text", "output", "text", "response", "completion"):
        if isinstance(response.get(key), str):
            return [Turn(ASSISTANT, response[key])]
    message = response.get("message", response)
    if isinstance(message, dict) and ("content" in message or "tool_calls" in message):
        return [Turn(ASSISTANT, message_text(message))]
    raise RowError("a response without `choices`, `output` or `content`")


def _of_list(parts: list[Any]) -> list[Turn]:
    """Streamed chunks, or the messages of an answer."""
    if any(isinstance(part, dict) and ("choices" in part or "delta" in part) for part in parts):
        return [Turn(ASSISTANT, _joined(parts))]
    return [turn for turn in turns_in(parts, "output") if turn.by_model]


def _of_choices(choices: list[Any]) -> list[Turn]:
    """The first choice that has a text; several choices are answers to one prompt."""
    texts = [_choice_text(choice) for choice in sorted(choices, key=_index)]
    if not texts:
        return []
    return [Turn(ASSISTANT, next((text for text in texts if text), ""))]


def _index(choice: Any) -> int:
    index = choice.get("index") if isinstance(choice, dict) else None
    return index if isinstance(index, int) else 0


def _choice_text(choice: Any) -> str:
    if not isinstance(choice, dict):
        raise RowError("`choices` must be a list of objects")
    if isinstance(message := choice.get("message"), dict):
        return message_text(message)
    return text_in(choice["text"], "the `text` of a choice") if choice.get("text") is not None else ""


def _streamed(text: str) -> str:
    lines = (line.strip().removeprefix(DATA).strip() for line in text.split("\n"))
    return _joined(parsed(line) for line in lines if line.startswith("{"))


def _joined(chunks: Iterable[Any]) -> str:
    """The text of streamed chunks, of the first choice."""
    texts: list[Any] = []
    for chunk in chunks:
        if not isinstance(chunk, dict):
            raise RowError("a streamed response must be a list of objects")
        delta = chunk.get("delta")
        if isinstance(delta, str) and str(chunk.get("type")).endswith("output_text.delta"):
            texts.append(delta)
        elif isinstance(delta, dict):
            texts.append(delta.get("text"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and _index(choice) == 0:
                inner = choice.get("delta")
                texts.append(inner.get("content") if isinstance(inner, dict) else choice.get("text"))
    return "".join(text for text in texts if isinstance(text, str))
