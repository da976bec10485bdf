"""The canonical form of conversations: one JSON object a line, which every command reads and ``convert`` writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdtool.data.conversations.conversation import QUESTIONS, TEXT, Conversation, Turn
from hdtool.data.conversations.reader import ConversationReader, Found
from hdtool.data.errors import RecordError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import LARGEST_JSON
from hdtool.data.formats.compression import packed, unpacked
from hdtool.data.progress import Bar
from hdtool.data.tally import counted

ORIGIN = "converted_from"
"""The key of the file and line that a conversation came from, by which files of ``convert`` are recognised."""


def canonical(found: Found) -> dict[str, Any]:
    """A conversation as a JSON object: ``id``, what is known of it, ``messages`` or what else it is, its origin."""
    conversation = found.conversation
    row: dict[str, Any] = {"id": conversation.id or str(found.row.number)}
    if conversation.category:
        row["category"] = conversation.category
    if conversation.model:
        row["model"] = conversation.model
    return row | _content(conversation) | {ORIGIN: found.where}


def canonical_line(found: Found) -> bytes:
    """A conversation as a line of a file; names that are not valid Unicode are escaped as JSON escapes them."""
    return (json.dumps(canonical(found), ensure_ascii=False) + "\n").encode(errors="backslashreplace")


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


def canonical_file(path: Path, *, private: bool = False) -> OutputFile:
    """The file that ``convert`` writes; only an earlier one of its own is replaced."""
    return OutputFile(path, "a file of hdtool convert", _is_canonical, RecordError, private=private)


def _is_canonical(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as raw, unpacked(raw) as stream:
            row = json.loads(stream.readline(LARGEST_JSON))
    except (ValueError, RecursionError, EOFError, OSError):
        return False
    return isinstance(row, dict) and ORIGIN in row


@dataclass
class Written:
    """What a file of conversations holds."""

    conversations: int = 0
    turns: int = 0
    answers: int = 0
    """Turns of the model that answer another role."""
    texts: int = 0
    """Plain texts."""

    def add(self, conversation: Conversation) -> None:
        if conversation.kind == TEXT:
            self.texts += 1
            return
        self.conversations += 1
        self.turns += len(conversation.turns)
        self.answers += len(conversation.answers)

    def counts(self) -> dict[str, int]:
        return asdict(self)

    def in_words(self) -> str:
        texts = f", {counted(self.texts, 'plain text')}" if self.texts else ""
        turns = (
            f"{counted(self.turns, 'turn')}, {self.answers:,} of them {'an answer' if self.answers == 1 else 'answers'}"
        )
        return f"{counted(self.conversations, 'conversation')} of {turns}{texts}"


def write_canonical(reader: ConversationReader, file: OutputFile, shown: Bar) -> Written:
    """Write all conversations, in their order; the file appears once it is complete."""
    written = Written()
    with file.replaced() as stream, packed(stream, file.path) as lines:
        for found in reader.conversations():
            lines.write(canonical_line(found))
            written.add(found.conversation)
            shown.to(reader.bytes_read)
        if not written.conversations and not written.texts:
            raise RecordError("no conversation is in the inputs: name files that hold some")
    return written
