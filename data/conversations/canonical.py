"""The canonical form of conversations: one JSON object a line, which every command reads and ``convert`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hdtool.data.conversations.conversation import QUESTIONS, TEXT, Conversation, Turn
from hdtool.data.conversations.reader import Found
from hdtool.data.errors import RecordError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import LARGEST_JSON
from hdtool.data.formats.compression import unpacked

ORIGIN = "converted_from"
"""The key of the file and line that a conversation came from, by which files of ``convert`` are recognised."""


def canonical(found: Found) -> dict[str, Any]:
    """A conversation as a JSON object: ``id``, ``category`` if known, ``messages`` or what else it is, its origin."""
    conversation = found.conversation
    row: dict[str, Any] = {"id": conversation.id or str(found.row.number)}
    if conversation.category:
        row["category"] = conversation.category
    return row | _content(conversation) | {ORIGIN: found.where}


def _content(conversation: Conversation) -> dict[str, Any]:
    turns = conversation.turns
    if conversation.kind == TEXT:
        return {"text": turns[0].text}
    if conversation.kind == QUESTIONS:
        return {"turns": [turn.text for turn in turns]}
    content: dict[str, Any] = {"messages": [{"role": turn.role, "content": turn.text} for turn in turns]}
    recorded = [turn for turn in turns if turn.ids]
    if recorded:
        if conversation.max_new_tokens is not None:
            content["max_new_tokens"] = conversation.max_new_tokens
        content["answers"] = [_answer(turn) for turn in recorded]
    elif any(turn.by_model for turn in turns[: conversation.prompted]):
        content["prompt_messages"] = conversation.prompted
    return content


def _answer(turn: Turn) -> dict[str, Any]:
    answer: dict[str, Any] = {"output_ids": list(turn.ids or ()), "finish": turn.finish}
    return answer | {"rankings": turn.rankings.as_json()} if turn.rankings else answer


def canonical_file(path: Path) -> OutputFile:
    """The file that ``convert`` writes; only an earlier one of its own is replaced."""
    return OutputFile(path, "a file of hdtool convert", _is_canonical, RecordError)


def _is_canonical(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as raw, unpacked(raw) as stream:
            row = json.loads(stream.readline(LARGEST_JSON))
    except (ValueError, RecursionError, EOFError, OSError):
        return False
    return isinstance(row, dict) and ORIGIN in row
