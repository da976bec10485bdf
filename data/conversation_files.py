"""Read conversations from files in any known format, and write them in hdtool's canonical format."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hdtool.data.conversation import ANSWERS, QUESTIONS, TEXT, Conversation, Turn, with_answers
from hdtool.data.conversation_shapes import conversation_of
from hdtool.data.errors import RecordError
from hdtool.data.input_files import input_errors_as, read_rows
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import MAX_JSON_BYTES
from hdtool.data.progress import ProgressBar, count_of
from hdtool.data.record_counts import TOLERANCE, Tally
from hdtool.data.row_readers import CountedFile, FileRow, RowError, compressed, decompressed

if TYPE_CHECKING:
    from hdtool.data.documents import InputFile


class LocatedConversation(NamedTuple):
    """Conversation with its place in the inputs."""

    conversation: Conversation
    where: str
    """File and line, for error messages and for the origin in canonical files."""
    source: int
    """Index of the input file."""
    row: FileRow


class ConversationReader:
    """Reader of conversations from files. It combines requests with answers that are in other rows."""

    def __init__(self, inputs: Sequence[Path], *, tolerance: float = TOLERANCE, text_lines: bool = False) -> None:
        self.inputs = list(inputs)
        self._tolerance = tolerance
        self._text_lines = text_lines
        self.sizes: list[int] = []
        for path in self.inputs:
            with input_errors_as(path):
                self.sizes.append(path.stat().st_size)
        self.hashes: dict[int, str] = {}
        self.restart()

    def restart(self) -> None:
        self.tally = Tally()
        self.bytes_read = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def sources(self) -> list[InputFile]:
        """Inputs with their SHA-256 hashes. The first access reads every file."""
        from hdtool.data.documents import InputFile

        for number, path in enumerate(self.inputs):
            if number not in self.hashes:
                with input_errors_as(path), path.open("rb") as file:
                    self.hashes[number] = hashlib.file_digest(file, "sha256").hexdigest()
        return [InputFile(str(path), self.hashes[number]) for number, path in enumerate(self.inputs)]

    def conversations(self) -> Iterator[LocatedConversation]:
        """Yield all conversations, and raise RecordError at the end if too many records cannot be used."""
        self.restart()
        # Requests and answers in separate rows are matched by key, in the order in which they occur.
        waiting: dict[tuple[bool, str], deque[LocatedConversation]] = defaultdict(deque)
        for located in chain.from_iterable(map(self.read_input, range(len(self.inputs)))):
            half, is_answer = located.conversation, located.conversation.kind == ANSWERS
            if not half.key:
                yield located
            elif queue := waiting[not is_answer, half.key]:
                partner = queue.popleft()
                question, answers = (partner, located) if is_answer else (located, partner)
                try:
                    whole = with_answers(question.conversation, answers.conversation)
                except RowError as fault:
                    self.tally.refuse(located.where, fault)
                else:
                    yield located._replace(conversation=whole, source=answers.source)
            else:
                waiting[is_answer, half.key].append(located)
        yield from chain.from_iterable(waiting.values())
        self.tally.check(self._tolerance)

    def read_input(self, source: int) -> Iterator[LocatedConversation]:
        """Yield the conversation in each usable row of one input file, without combining requests and answers.

        If the file cannot be read to its end, the conversations before the fault are yielded.
        """
        path, size = self.inputs[source], self.sizes[source]
        before, unread = self.bytes_read, None
        try:
            with input_errors_as(path), CountedFile(path) as raw:
                for row in read_rows(raw, text_lines=self._text_lines):
                    self.bytes_read = before + row.consumed
                    if located := self._located(row, path, source):
                        yield located
        except RecordError as fault:
            unread = fault
        self.tally.count_file(size, unread)
        self.bytes_read = before + size

    def _located(self, row: FileRow, path: Path, source: int) -> LocatedConversation | None:
        """Return a row's conversation, or None if the row cannot be used. Either way, the row is counted."""
        where = f"{path}{row.location}"
        try:
            conversation = conversation_of(row.value)
        except ValueError as fault:
            self.tally.note(where, fault)
            return None
        self.tally.good += 1
        if conversation.model and any(turn.by_model for turn in conversation.turns):
            self.tally.name_model(conversation.model)
        return LocatedConversation(conversation, where, source, row)


ORIGIN_KEY = "converted_from"
"""Key of the file and line that a conversation came from. ``convert`` recognizes its own files by this key."""


def canonical(located: LocatedConversation) -> dict[str, Any]:
    """Return a conversation as a JSON object: its id, its category and model if known, its content and its origin."""
    conversation = located.conversation
    row: dict[str, Any] = {"id": conversation.id or str(located.row.number)}
    if conversation.category:
        row["category"] = conversation.category
    if conversation.model:
        row["model"] = conversation.model
    return row | _content(conversation) | {ORIGIN_KEY: located.where}


def canonical_line(located: LocatedConversation) -> bytes:
    """Encode a conversation as a line of JSON; lone surrogates, which file names may hold, become JSON escapes."""
    return (json.dumps(canonical(located), ensure_ascii=False) + "\n").encode(errors="backslashreplace")


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
    """Return the output file of ``convert``, which replaces only files that ``convert`` wrote."""
    return OutputFile(path, "a file of hdtool convert", _is_canonical, RecordError, private=private)


def _is_canonical(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as raw, decompressed(raw) as stream:
            row = json.loads(stream.readline(MAX_JSON_BYTES))
    except (ValueError, RecursionError, EOFError, OSError):
        return False
    return isinstance(row, dict) and ORIGIN_KEY in row


@dataclass
class ConversationCounts:
    """Numbers of conversations, turns, answers and plain texts in a file."""

    conversations: int = 0
    turns: int = 0
    answers: int = 0
    """Number of the model's answers, as counted by ``Conversation.answers``."""
    texts: int = 0

    def add(self, conversation: Conversation) -> None:
        if conversation.kind == TEXT:
            self.texts += 1
            return
        self.conversations += 1
        self.turns += len(conversation.turns)
        self.answers += len(conversation.answers)

    def in_words(self) -> str:
        texts = f", {count_of(self.texts, 'plain text')}" if self.texts else ""
        answers = "an answer" if self.answers == 1 else "answers"
        turns = f"{count_of(self.turns, 'turn')}, {self.answers:,} of them {answers}"
        return f"{count_of(self.conversations, 'conversation')} of {turns}{texts}"


def write_canonical(reader: ConversationReader, file: OutputFile, progress: ProgressBar) -> ConversationCounts:
    """Write all conversations in order and return their counts.

    If there are none, raise RecordError and write no file.
    """
    written = ConversationCounts()
    with file.replaced() as stream, compressed(stream, file.path) as lines:
        for located in reader.conversations():
            lines.write(canonical_line(located))
            written.add(located.conversation)
            progress.to(reader.bytes_read)
        if not written.conversations and not written.texts:
            raise RecordError("no conversation is in the inputs: name files that hold some")
    return written
