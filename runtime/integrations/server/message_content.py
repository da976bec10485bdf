"""Contents of messages: texts, or lists of parts, of which the model reads only the text parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from hdtool.runtime.integrations.server.openai_formats import RequestError

UNSUPPORTED_CONTENT = "unsupported_content"
UNREADABLE_NOTE = "[{}: left out, because this model reads text only]"
"""Text that replaces an image or a file in a tool result; images and files from users are refused."""


class StrictJson(BaseModel):
    """A JSON object whose values must have exactly the declared types."""

    model_config = ConfigDict(strict=True)


class MessagePart(StrictJson):
    """A part of a message's content; ``text_of_part`` refuses parts that aren't text."""

    text_types: ClassVar[Sequence[str]] = ("text",)
    media_types: ClassVar[Mapping[str, str]] = {}
    """Types of media that a tool result may contain, each with the word for it."""
    type: str
    text: str | None = None

    @property
    def said(self) -> str | None:
        return self.text


def text_of_part(part: MessagePart, where: str) -> str:
    """Return the text of a part; raise RequestError if it is of another type or has no text."""
    if part.type not in part.text_types:
        raise RequestError(
            f"{where}: this server takes text only, and this part is of type {part.type[:40]!r}: leave it out, or "
            "describe it in a part of type 'text'",
            param=f"{where}.type",
            code=UNSUPPORTED_CONTENT,
        )
    if part.said is None:
        raise RequestError(f"{where}: this part has no text", param=f"{where}.text")
    return part.said


def text_of_content(
    content: str | Sequence[MessagePart] | None, where: str, *, joint: str = "", notes: bool = False
) -> str:
    """Return the text of a message's content, its parts joined by ``joint``.

    With ``notes``, a note replaces an image or a file. Other parts without text raise RequestError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return joint.join(
        UNREADABLE_NOTE.format(part.media_types[part.type])
        if notes and part.type in part.media_types
        else text_of_part(part, f"{where}.{index}")
        for index, part in enumerate(content)
    )


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Add to each tool result, in place, the name of the function whose call it answers."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    for message in messages:
        if (name := names.get(message.get("tool_call_id"))) is not None:
            message["name"] = name
