"""Instructions after the start of a conversation, which some chat templates refuse."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return True if the chat template renders system messages wherever they occur in a conversation."""
    if not has_chat_template(tokenizer):
        return True
    try:
        text = conversation_text(tokenizer, CONVERSATION, chat=True)
    except PromptError:
        return False
    return all(instruction in text for instruction in LATE_INSTRUCTIONS)


def with_early_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning into one, and convert later system messages to user messages.

    A converted message is joined with the user messages next to it.
    """
    made: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        is_late = message["role"] == SYSTEM and any(before["role"] != SYSTEM for before in made)
        if is_late:
            message = {**message, "role": USER}
        last = made[-1] if made else {}
        joins = message["role"] == last.get("role") and (is_late or joins or message["role"] == SYSTEM)
        if joins:
            made[-1] = {**last, "content": last["content"] + PARAGRAPH + message["content"]}
        else:
            made.append(message)
            joins = is_late
    return made
