"""Writes the conversations of inputs in the canonical form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hdtool.data.conversations.canonical import canonical
from hdtool.data.conversations.conversation import TEXT, Conversation
from hdtool.data.conversations.reader import ConversationReader
from hdtool.data.errors import RecordError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.formats.compression import packed
from hdtool.data.progress import Bar


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
        texts = f", {self.texts:,} plain texts" if self.texts else ""
        return f"{self.conversations:,} conversations of {self.turns:,} turns, {self.answers:,} of them answers{texts}"


def write_canonical(reader: ConversationReader, file: OutputFile, shown: Bar) -> Written:
    """Write all conversations, in their order; the file appears once it is complete."""
    written = Written()
    with file.replaced() as stream, packed(stream, file.path) as lines:
        for found in reader.conversations():
            lines.write((json.dumps(canonical(found), ensure_ascii=False) + "\n").encode())
            written.add(found.conversation)
            shown.to(reader.bytes_read)
        if not written.conversations and not written.texts:
            raise RecordError("no conversation is in the inputs: name files that hold some")
    return written
