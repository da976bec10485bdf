"""System messages after the start of a conversation, and their conversion for chat templates that refuse them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hdtool.data.chat import (
    conversation_text,
    has_chat_template,
)
from hdtool.data.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARAGRAPH = "\n\n"
SYSTEM, USER = "system", "user"
LATE_INSTRUCTIONS = ("after a question", "after an answer", "at the end")
CONVERSATION = (
    {"role": SYSTEM, "content": "first instruction"},
    {"role": USER, "content": "question"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[0]},
    {"role": "assistant", "content": "answer"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[1]},
    {"role": USER, "content": "next question"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[2]},
)


def takes_late_instructions(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if there is no chat template, or one that renders system messages anywhere in a conversation."""
    return not has_chat_template(tokenizer) or _shows(tokenizer, CONVERSATION, LATE_INSTRUCTIONS)


def takes_instructions(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template renders a system message at the beginning of a conversation."""
    return _shows(tokenizer, CONVERSATION[:2], [CONVERSATION[0]["content"]])


def _shows(tokenizer: PreTrainedTokenizerBase, conversation: Sequence[dict[str, str]], texts: Sequence[str]) -> bool:
    try:
        rendered = conversation_text(tokenizer, conversation, chat=True)
    except PromptError:
        return False
    return all(text in rendered for text in texts)


def with_early_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning into one, and convert later system messages to user messages.

    A converted message is joined with the user messages next to it.
    """
    start = next((index for index, message in enumerate(messages) if message["role"] != SYSTEM), len(messages))
    late = [
        ({**message, "role": USER}, True) if message["role"] == SYSTEM else (message, False)
        for message in messages[start:]
    ]
    return join_changed([*((message, True) for message in messages[:start]), *late])


def join_changed(messages: Iterable[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Join each changed message with the messages of the same role next to it.

    Each item of ``messages`` is ``(message, is_changed)``.
    """
    made: list[dict[str, Any]] = []
    joins = False
    for message, is_changed in messages:
        if made and message["role"] == made[-1]["role"] and (joins or is_changed):
            made[-1] = {**made[-1], "content": made[-1]["content"] + PARAGRAPH + message["content"]}
            joins = True
        else:
            made.append(message)
            joins = is_changed
    return made
