"""Records: texts to draft from, read from conversations, generations and plain texts.

The keys of a JSON object or a Parquet row determine its kind:

- ``conversations`` (ShareGPT), ``messages`` (chat) or ``conversation``: turns with ``from`` or ``role``,
  and ``value`` or ``content``;
- ``choices`` (Spec-Bench answers): the ``turns`` of the first one;
- ``output``, ``answer``, ``response`` or ``completion``, usually with ``prompt``, ``question`` or
  ``instruction`` and ``input``;
- ``text`` or ``content``: an answer if there is a prompt, else a plain text, like a bare JSON string.

Records that cannot be used are counted and named; too many of them are an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hdtool.data.errors import RecordError
from hdtool.data.inputs import CountedFile, RowError, faults_named, rows_of
from hdtool.data.spec_bench import turns_of
from hdtool.data.stores.documents import Source
from hdtool.data.tally import Tally
from hdtool.data.unicode import lone_surrogate

CONVERSATION_KEYS = ("conversations", "messages", "conversation")
PROMPT_KEYS = ("instruction", "input", "prompt", "question")
ANSWER_KEYS = ("output", "answer", "response", "completion")
TEXT_KEYS = ("text", "content")
TURN_KEYS = ("value", "content", "text")
ANSWERERS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model")


class Part(NamedTuple):
    """A part of a record."""

    text: str
    by_model: bool
    ids: tuple[int, ...] | None = None
    """Its tokens, if they were recorded."""
    role: str = "user"
    """The role in a chat of a part that the model did not write."""


@dataclass(frozen=True)
class Record:
    """Texts that belong together, each a separate document, and the number of their input."""

    texts: tuple[str, ...]
    source: int
    parts: tuple[Part, ...] = ()
    """All parts of the record in order."""


@dataclass(frozen=True)
class Portion:
    """A part of an input that one process reads for another."""

    texts: Sequence[str]
    tally: Tally
    consumed: int
    """Bytes of the input up to here."""
    is_last: bool = False
    held_text: bool = False
    """Whether there were texts before ``without_texts``."""

    def without_texts(self) -> Portion:
        return replace(self, texts=(), held_text=bool(self.texts))


class Reading:
    """Iterates over the records of inputs, and counts what it reads."""

    def __init__(self, inputs: Sequence[Path], *, answers_only: bool = False, tolerance: float = 0.05) -> None:
        self.inputs = list(inputs)
        self.answers_only = answers_only
        self._tolerance = tolerance
        self.sizes: list[int] = []
        for path in self.inputs:
            with faults_named(path):
                self.sizes.append(path.stat().st_size)
        self.hashes: dict[int, str] = {}
        self.restart()

    def restart(self) -> None:
        self.tally = Tally()
        self.bytes_read = 0
        self._before = 0
        self._found = False

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def sources(self) -> list[Source]:
        """The inputs and their hashes; a file that was not read to its end is read again here."""
        for number, path in enumerate(self.inputs):
            if number not in self.hashes:
                with faults_named(path), path.open("rb") as file:
                    self.hashes[number] = hashlib.file_digest(file, "sha256").hexdigest()
        return [Source(str(path), self.hashes[number]) for number, path in enumerate(self.inputs)]

    def __iter__(self) -> Iterator[Record]:
        self.restart()
        for source in range(len(self.inputs)):
            for parts in self._parts(source):
                if texts := self._wanted(parts):
                    self._found = True
                    yield Record(texts, source, parts)
        self.finish()

    def portions(self, texts: int) -> Iterator[Portion]:
        """A single input in portions of at least so many texts; another process counts them with ``take``."""
        self.restart()
        held: list[str] = []
        for parts in self._parts(0):
            held += self._wanted(parts)
            if len(held) >= texts:
                yield Portion(held, self.tally, self.bytes_read)
                held, self.tally = [], Tally()
        yield Portion(held, self.tally, self.bytes_read, is_last=True)

    def take(self, portion: Portion) -> None:
        """Count a portion that another process read; portions come in the order of the inputs."""
        self.tally.add(portion.tally)
        self._found |= portion.held_text
        self.bytes_read = self._before + portion.consumed
        if portion.is_last:
            self._before = self.bytes_read

    def finish(self) -> None:
        """Raise if too many records cannot be used, or none can."""
        self.tally.check(self._tolerance)
        if not self._found:
            what = "answers of a model" if self.answers_only else "text"
            raise RecordError(f"no {what} found in {_names(self.inputs)}: name files that hold some")

    def _wanted(self, parts: Iterable[Part]) -> tuple[str, ...]:
        return tuple(part.text for part in parts if part.by_model or not self.answers_only)

    def _parts(self, source: int) -> Iterator[tuple[Part, ...]]:
        path, size = self.inputs[source], self.sizes[source]
        before = self.bytes_read
        with faults_named(path), CountedFile(path) as raw:
            for row in rows_of(path, raw, size):
                self.bytes_read = before + row.consumed
                try:
                    parts = _parts_of(row.value)
                except ValueError as fault:
                    self.tally.note(f"{path}{row.place}", fault)
                    continue
                self.tally.good += 1
                yield parts
            # Parquet is not read through the counted file: ``sources`` computes its hash.
            if raw.count >= size:
                self.hashes[source] = raw.sha256()
        self.bytes_read = before + size


def _names(paths: Sequence[Path]) -> str:
    if not paths:
        return "no input at all"
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])


def _parts_of(value: Any) -> tuple[Part, ...]:
    """The parts of a row in order; raises if there is none."""
    parts = tuple(part for part in _raw_parts(value) if part.text and not part.text.isspace())
    if not parts:
        raise RowError("empty conversation" if isinstance(value, dict) else "empty text")
    for part in parts:
        if fault := lone_surrogate(part.text):
            raise RowError(f"not valid Unicode ({fault})")
    return parts


def _raw_parts(value: Any) -> list[Part]:
    if isinstance(value, RowError):
        raise value
    if isinstance(value, str):
        return [Part(value, True)]
    if not isinstance(value, dict):
        raise RowError(f"a record is an object or a text (found: {type(value).__name__})")
    # A Parquet row has all columns of its file, some of them null.
    row = {key: held for key, held in value.items() if held is not None}
    for key in CONVERSATION_KEYS:
        if key in row:
            if not isinstance(row[key], list):
                raise RowError(f"`{key}` must be a list (found: {type(row[key]).__name__})")
            parts = [_turn(turn) for turn in row[key]]
            return _with_ids(parts, row["answers"]) if "answers" in row else parts
    if "choices" in row:
        return [Part(text, by_model=True) for text in turns_of(row["choices"])]
    return _pair(row)


def _with_ids(parts: list[Part], answers: Any) -> list[Part]:
    """Add the tokens of the last answers, which ``collect`` records."""
    rows = answers if isinstance(answers, list) else []
    ids = [row.get("output_ids") for row in rows if isinstance(row, dict)]
    places = [place for place, part in enumerate(parts) if part.by_model][-len(ids) :] if ids else []
    for place, found in zip(places, ids, strict=False):
        if isinstance(found, list) and found and all(type(token) is int and token >= 0 for token in found):
            parts[place] = parts[place]._replace(ids=tuple(found))
    return parts


def _turn(turn: Any) -> Part:
    held = [turn[key] for key in TURN_KEYS if key in turn] if isinstance(turn, dict) else []
    if not held:
        raise RowError("a turn needs a role and a text, as `from` and `value` or as `role` and `content`")
    # The text of a message that calls a tool is null.
    text = next((text for text in held if text is not None), "")
    if isinstance(text, list):
        text = "\n".join(_texts_of_parts(text))
    role = turn.get("from") or turn.get("role")
    name = str(role).lower()
    return Part(_text(text, "a turn's text"), name in ANSWERERS, role="system" if name == "system" else "user")


def _texts_of_parts(parts: list[Any]) -> Iterator[str]:
    """The texts of a message in parts; images and sounds have none."""
    for part in parts:
        if not isinstance(part, dict):
            raise RowError("a message in parts needs objects with a `text`")
        if part.get("text") is not None:
            yield _text(part["text"], "the `text` of a message's part")


def _pair(row: dict[str, Any]) -> list[Part]:
    asked = [key for key in PROMPT_KEYS if key in row]
    # If there is an answer, `text` usually repeats prompt and answer.
    answers = [key for key in ANSWER_KEYS if key in row] or [key for key in TEXT_KEYS if key in row][:1]
    if not asked and not answers:
        raise RowError(f"no conversation, answer or text in it (found: {', '.join(map(str, row)) or 'nothing'})")
    return [Part(_text(row[key], f"`{key}`"), key in answers) for key in asked + answers]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be a text (found: {type(value).__name__})")
    return value
