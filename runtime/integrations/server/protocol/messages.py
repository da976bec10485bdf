"""The messages of a chat request, as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hdtool.runtime.integrations.server.protocol.errors import RequestError
from hdtool.runtime.integrations.server.protocol.schema import Call, ChatMessage, ChatRequest

TEXT = "text"
UNSUPPORTED = "unsupported_content"


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages with texts as contents, and with the arguments of tool calls as objects."""
    return [_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: a message needs a content", param=f"{where}.content")
    _require_text(message, where)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return made


def _require_text(message: ChatMessage, where: str) -> None:
    for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type != TEXT:
            raise RequestError(
                f"this server answers text only, and part {place + 1} of {where} is of type {part.type[:40]!r}: leave "
                "it out, or describe it in a part of type 'text'",
                param=f"{where}.content.{place}.type",
                code=UNSUPPORTED,
            )
        if part.text is None:
            raise RequestError(f"part {place + 1} of {where} has no text", param=f"{where}.content.{place}.text")


def require_text_answers(asked: ChatRequest) -> None:
    """Refuse a request for sound, which OpenAI's API asks for by two fields."""
    other = next((kind for kind in asked.modalities or () if kind != TEXT), None)
    if other is not None or asked.audio is not None:
        raise RequestError(
            f"this server answers text only, and the request asks for {(other or 'audio')[:40]!r}: leave out "
            f"{'modalities' if other else 'audio'}",
            param="modalities" if other else "audio",
            code=UNSUPPORTED,
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
