"""Messages of the system after the first turn, for chat templates that refuse them or leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hdtool.data.chat import conversation_text, has_chat_template
from hdtool.data.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARAGRAPH = "\n\n"
SYSTEM, USER = "system", "user"
LATE = ("after a question", "after an answer", "at the end")
CONVERSATION = (
    {"role": SYSTEM, "content": "first instruction"},
    {"role": USER, "content": "question"},
    {"role": SYSTEM, "content": LATE[0]},
    {"role": "assistant", "content": "answer"},
    {"role": SYSTEM, "content": LATE[1]},
    {"role": USER, "content": "next question"},
    {"role": SYSTEM, "content": LATE[2]},
)


def takes_late_instructions(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template shows the model messages of the system wherever they are in a conversation."""
    if not has_chat_template(tokenizer):
        return True
    try:
        text = conversation_text(tokenizer, CONVERSATION, chat=True)
    except PromptError:
        return False
    return all(instruction in text for instruction in LATE)


def with_early_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of the system at the beginning as one, and with later ones in turns of the user."""
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
