"""Lists of messages: the chat format, ShareGPT, and the items of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hdtool.data.conversations.conversation import ASSISTANT, ROLES, SYSTEM, TOOL, USER, Turn
from hdtool.data.formats.row import RowError, parsed

NAMES = {
    SYSTEM: ("system", "developer"),
    USER: ("user", "human", "prompter"),
    ASSISTANT: ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "function_call"),
    TOOL: ("tool", "function", "function_response", "observation", "ipython", "environment"),
}
"""Names of each role in the data sets and APIs that are read."""
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
TEXT_KEYS = ("value", "content", "text")
CALL_KEYS = ("tool_calls", "function_call", "refusal")
"""Keys of messages that may have no text."""
UNSAID = ("reasoning", "thinking", "redacted_thinking", "summary_text", "reasoning_text")
"""Types of parts that are not a part of the answer."""
MEDIA = ("image", "audio", "video", "file", "document")
"""One of them is in the type of each part that is not text."""
ITEM_ROLES = {"function_call": ASSISTANT, "custom_tool_call": ASSISTANT, "function_call_output": TOOL}
"""Roles of the items of the Responses API that are no messages."""


def turns_in(value: Any, name: str) -> list[Turn]:
    """The turns of a list of messages."""
    messages = _listed(value)
    if not isinstance(messages, list):
        raise RowError(f"`{name}` must be a list (found: {type(value).__name__})")
    return [turn for message in messages if (turn := _turn(message)) is not None]


def _listed(value: Any) -> Any:
    """A list of messages that is a JSON text, or a table with a column for each key."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parsed(value)
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, row, strict=False)) for row in zip(*value.values(), strict=False)]
    return value


def _turn(message: Any) -> Turn | None:
    kind = message.get("type") if isinstance(message, dict) else None
    if isinstance(kind, str) and kind in ITEM_ROLES:
        return Turn(ITEM_ROLES[kind], content_text(message.get("output")))
    if kind in UNSAID:
        return None
    if not isinstance(message, dict) or not any(key in message for key in (*TEXT_KEYS, *CALL_KEYS)):
        raise _incomplete()
    text = message_text(message)
    if (named := message.get("from") or message.get("role")) is None:
        raise _incomplete()
    return Turn(role_of(named), text)


def _incomplete() -> RowError:
    return RowError("a turn needs a role and a text, as `from` and `value` or as `role` and `content`")


def role_of(name: Any) -> str:
    """One of the four roles by any of its names."""
    role = ROLE_OF.get(str(name).lower())
    if role is None:
        raise RowError(f"unknown role {str(name)[:40]!r}: expected one of {', '.join(ROLES)}")
    return role


def message_text(message: dict[str, Any]) -> str:
    """The text of a message; that of one that only calls a tool is empty."""
    held = [message[key] for key in TEXT_KEYS if key in message]
    text = content_text(next((text for text in held if text is not None), None))
    refusal = message.get("refusal")
    return refusal if not text and isinstance(refusal, str) else text


def content_text(content: Any) -> str:
    """The text of a content: a text, null, or parts, of which images and sounds have none."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(_texts(content))
    return text_in(content, "a turn's text")


def _texts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict):
            raise RowError("a message in parts needs objects with a `text`")
        if part.get("type") in UNSAID:
            continue
        text = part.get("text") if part.get("text") is not None else part.get("refusal")
        if isinstance(text, dict):  # the Assistants API keeps notes beside a text
            text = text.get("value")
        if text is not None:
            yield text_in(text, "the `text` of a message's part")


def media_part(content: Any) -> str | None:
    """The type of the first part of a content that is an image, a sound, a video or a file; None if there is none."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(media in kind for media in MEDIA):
            return kind
    return None


def text_in(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be a text (found: {type(value).__name__})")
    return value
