"""Reads inputs as conversations: counts what it reads, names what it cannot use, and hashes the files."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hdtool.data.conversations.conversation import ANSWERS, Conversation, answered
from hdtool.data.conversations.interpret import conversation_of
from hdtool.data.formats.row import CountedFile, Row, RowError
from hdtool.data.formats.rows import rows_of
from hdtool.data.inputs import faults_named
from hdtool.data.tally import TOLERANCE, Tally

if TYPE_CHECKING:
    from hdtool.data.stores.documents import Source


class Found(NamedTuple):
    """A conversation and where it is."""

    conversation: Conversation
    where: str
    """Its file and line, for messages."""
    source: int
    """The number of its input."""
    row: Row


class ConversationReader:
    """Iterates over the conversations of inputs; requests and answers in separate rows are put together."""

    def __init__(self, inputs: Sequence[Path], *, tolerance: float = TOLERANCE, text_lines: bool = False) -> None:
        self.inputs = list(inputs)
        self._tolerance = tolerance
        self._text_lines = text_lines
        self.sizes: list[int] = []
        for path in self.inputs:
            with faults_named(path):
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
    def sources(self) -> list[Source]:
        """The inputs and their hashes, for which each file is read once."""
        from hdtool.data.stores.documents import Source  # which imports numpy

        for number, path in enumerate(self.inputs):
            if number not in self.hashes:
                with faults_named(path), path.open("rb") as file:
                    self.hashes[number] = hashlib.file_digest(file, "sha256").hexdigest()
        return [Source(str(path), self.hashes[number]) for number, path in enumerate(self.inputs)]

    def conversations(self) -> Iterator[Found]:
        """All conversations; raises at the end if too many records cannot be used."""
        self.restart()
        # Requests and answers in separate rows wait for their other half by its key, in their order.
        waiting: dict[tuple[bool, str], deque[Found]] = defaultdict(deque)
        for found in chain.from_iterable(map(self.of_input, range(len(self.inputs)))):
            half, is_answer = found.conversation, found.conversation.kind == ANSWERS
            if not half.key:
                yield found
            elif others := waiting[not is_answer, half.key]:
                other = others.popleft()
                asked, answers = (other, found) if is_answer else (found, other)
                try:
                    whole = answered(asked.conversation, answers.conversation)
                except RowError as fault:
                    self.tally.refuse(found.where, fault)
                else:
                    yield found._replace(conversation=whole, source=answers.source)
            else:
                waiting[is_answer, half.key].append(found)
        yield from chain.from_iterable(waiting.values())
        self.tally.check(self._tolerance)

    def of_input(self, source: int) -> Iterator[Found]:
        """The conversations of one input, as its rows have them."""
        path, size = self.inputs[source], self.sizes[source]
        before = self.bytes_read
        with faults_named(path), CountedFile(path) as raw:
            for row in rows_of(raw, text_lines=self._text_lines):
                self.bytes_read = before + row.consumed
                where = f"{path}{row.place}"
                try:
                    conversation = conversation_of(row.value)
                except ValueError as fault:
                    self.tally.note(where, fault)
                    continue
                self.tally.good += 1
                if conversation.model and any(turn.by_model for turn in conversation.turns):
                    self.tally.name_model(conversation.model)
                yield Found(conversation, where, source, row)
        self.bytes_read = before + size
