"""Prompts with their answers as texts, prompts alone, and plain texts."""

from __future__ import annotations

from typing import Any

from hdtool.data.conversations.conversation import ASSISTANT, CHAT, SYSTEM, TEXT, USER, Conversation, Turn
from hdtool.data.conversations.messages import text_in

SYSTEM_KEYS = ("system", "system_prompt")
PROMPT_KEYS = ("instruction", "input", "prompt", "question")
ANSWER_KEYS = ("output", "answer", "response", "completion")
TEXT_KEYS = ("text", "content")


def pair_in(row: dict[str, Any]) -> Conversation | None:
    """The prompt and the answer of a row, or its text; None if it has neither."""
    asked = [key for key in PROMPT_KEYS if key in row]
    # If there is an answer, `text` usually repeats prompt and answer.
    answers = [key for key in ANSWER_KEYS if key in row] or [key for key in TEXT_KEYS if key in row][:1]
    if not asked and not answers:
        return None
    if not asked and answers[0] in TEXT_KEYS:
        return Conversation((Turn(ASSISTANT, _text(row, answers[0])),), kind=TEXT)
    turns = [Turn(SYSTEM, _text(row, key)) for key in SYSTEM_KEYS if isinstance(row.get(key), str)][:1]
    prompt = "\n\n".join(text for key in asked if (text := _text(row, key)).strip())
    if asked:
        turns.append(Turn(USER, prompt))
    turns += [Turn(ASSISTANT, _text(row, key)) for key in answers]
    return Conversation(tuple(turns), kind=CHAT)


def _text(row: dict[str, Any], key: str) -> str:
    return text_in(row[key], f"`{key}`")
