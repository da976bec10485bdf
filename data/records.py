"""Records: texts to draft from, out of the conversations, generations and plain texts that users have.

A JSON object or a Parquet row says what it holds by its keys:

- ``conversations`` (ShareGPT), ``messages`` (chat) or ``conversation``: turns with ``from`` or ``role``,
  and ``value`` or ``content``;
- ``choices`` (Spec-Bench answers): the ``turns`` of the first one;
- ``output``, ``answer``, ``response`` or ``completion``, as a rule beside ``prompt``, ``question`` or
  ``instruction`` and ``input``;
- ``text`` or ``content``: an answer beside a prompt, else a plain text, as a bare JSON string is one.

What cannot be used is counted and named, and ends the reading only once it is too much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hdtool.data.errors import RecordError
from hdtool.data.inputs import CountedFile, RowError, faults_named, rows_of
from hdtool.data.stores.documents import Source
from hdtool.data.tally import Tally

CONVERSATION_KEYS = ("conversations", "messages", "conversation")
PROMPT_KEYS = ("instruction", "input", "prompt", "question")
ANSWER_KEYS = ("output", "answer", "response", "completion")
TEXT_KEYS = ("text", "content")
TURN_KEYS = ("value", "content", "text")
ANSWERERS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model")


class Said(NamedTuple):
    """A part of a record."""

    text: str
    by_model: bool
    ids: tuple[int, ...] | None = None
    """Its tokens, where they were recorded."""
    role: str = "user"
    """Of somebody else in a chat."""


@dataclass(frozen=True)
class Record:
    """Texts that belong together, each a document of its own, and the input they came from."""

    texts: tuple[str, ...]
    source: int
    said: tuple[Said, ...] = ()
    """All of the record's parts in their order, those by others than the model too."""


@dataclass(frozen=True)
class Portion:
    """A stretch of an input, as one process reads it for another."""

    texts: Sequence[str]
    tally: Tally
    consumed: int
    """Bytes of the input up to here."""
    is_last: bool = False
    held_text: bool = False
    """Whether there were texts, for who has taken them out."""

    def without_texts(self) -> Portion:
        return replace(self, texts=(), held_text=bool(self.texts))


class Reading:
    """The records of inputs: iterate over them, and look here for what came by."""

    def __init__(self, inputs: Sequence[Path], *, answers_only: bool = False, tolerance: float = 0.05) -> None:
        self.inputs = list(inputs)
        self.answers_only = answers_only
        self._tolerance = tolerance
        self.sizes = [_size(path) for path in self.inputs]
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
        """The inputs and their hashes; a file that was not read to its end is read for it here."""
        for number, path in enumerate(self.inputs):
            if number not in self.hashes:
                with faults_named(path), path.open("rb") as file:
                    self.hashes[number] = hashlib.file_digest(file, "sha256").hexdigest()
        return [Source(str(path), self.hashes[number]) for number, path in enumerate(self.inputs)]

    def __iter__(self) -> Iterator[Record]:
        self.restart()
        for source in range(len(self.inputs)):
            for said in self._said(source):
                if texts := self._wanted(said):
                    self._found = True
                    yield Record(texts, source, said)
        self.finish()

    def portions(self, texts: int) -> Iterator[Portion]:
        """A single input in stretches of so many texts, or some more; for whoever ``takes`` them elsewhere."""
        self.restart()
        held: list[str] = []
        for said in self._said(0):
            held += self._wanted(said)
            if len(held) >= texts:
                yield Portion(held, self.tally, self.bytes_read)
                held, self.tally = [], Tally()
        yield Portion(held, self.tally, self.bytes_read, is_last=True)

    def take(self, portion: Portion) -> None:
        """Count what another process read, stretch by stretch in the order of the inputs."""
        self.tally.add(portion.tally)
        self._found |= portion.held_text
        self.bytes_read = self._before + portion.consumed
        if portion.is_last:
            self._before = self.bytes_read

    def finish(self) -> None:
        """All is read; whether it was enough."""
        self.tally.check(self._tolerance)
        if not self._found:
            what = "answers of a model" if self.answers_only else "text"
            raise RecordError(f"no {what} found in {_names(self.inputs)}: name files that hold some")

    def _wanted(self, said: Iterable[Said]) -> tuple[str, ...]:
        return tuple(part.text for part in said if part.by_model or not self.answers_only)

    def _said(self, source: int) -> Iterator[tuple[Said, ...]]:
        path, size = self.inputs[source], self.sizes[source]
        before = self.bytes_read
        with faults_named(path), CountedFile(path) as raw:
            for row in rows_of(path, raw, size):
                self.bytes_read = before + row.consumed
                try:
                    said = _parts_of(row.value)
                except RowError as fault:
                    self.tally.note(f"{path}{row.place}", fault)
                    continue
                self.tally.good += 1
                yield said
            # Parquet is read around the counted file; its hash waits until someone asks.
            if raw.count >= size:
                self.hashes[source] = raw.sha256()
        self.bytes_read = before + size


def _size(path: Path) -> int:
    with faults_named(path):
        return path.stat().st_size


def _names(paths: Sequence[Path]) -> str:
    if not paths:
        return "no input at all"
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])


def _parts_of(value: Any) -> tuple[Said, ...]:
    """The parts of a row, in their order; none at all raises."""
    said = tuple(part for part in _said(value) if part.text and not part.text.isspace())
    if not said:
        raise RowError("empty conversation" if isinstance(value, dict) else "empty text")
    for part in said:
        _check_unicode(part.text)
    return said


def _check_unicode(text: str) -> None:
    """JSON can spell half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"half a character, \\u{ord(text[error.start]):x}, which is no text") from None


def _said(value: Any) -> list[Said]:
    if isinstance(value, RowError):
        raise value
    if isinstance(value, str):
        return [Said(value, True)]
    if not isinstance(value, dict):
        raise RowError(f"a record is an object or a text (found: {type(value).__name__})")
    # A Parquet row has all columns of its file.
    row = {key: held for key, held in value.items() if held is not None}
    for key in CONVERSATION_KEYS:
        if key in row:
            said = [_turn(turn) for turn in _listed(row[key], key)]
            return _with_ids(said, row["answers"]) if "answers" in row else said
    if "choices" in row:
        return _chosen(row["choices"])
    return _pair(row)


def _with_ids(said: list[Said], answers: Any) -> list[Said]:
    """``collect`` keeps the tokens of the last answers."""
    ids = (
        [answer.get("output_ids") for answer in answers if isinstance(answer, dict)]
        if isinstance(answers, list)
        else []
    )
    places = [place for place, part in enumerate(said) if part.by_model][-len(ids) :] if ids else []
    for place, found in zip(places, ids, strict=False):
        if isinstance(found, list) and found and all(type(token) is int and token >= 0 for token in found):
            said[place] = said[place]._replace(ids=tuple(found))
    return said


def _turn(turn: Any) -> Said:
    held = [turn[key] for key in TURN_KEYS if key in turn] if isinstance(turn, dict) else []
    if not held:
        raise RowError("a turn needs a role and a text, as `from` and `value` or as `role` and `content`")
    # A message that calls a tool has null for its text.
    text = next((text for text in held if text is not None), "")
    if isinstance(text, list):
        text = "\n".join(_texts_of_parts(text))
    role = turn.get("from") or turn.get("role")
    name = str(role).lower()
    return Said(_text(text, "a turn's text"), name in ANSWERERS, role="system" if name == "system" else "user")


def _texts_of_parts(parts: list[Any]) -> Iterator[str]:
    """The texts of a message that is made of parts; pictures and sounds among them have none."""
    for part in parts:
        if not isinstance(part, dict):
            raise RowError("a message in parts needs objects with a `text`")
        if part.get("text") is not None:
            yield _text(part["text"], "the `text` of a message's part")


def _chosen(choices: Any) -> list[Said]:
    first = next(iter(_listed(choices, "choices")), None)
    if not isinstance(first, dict) or "turns" not in first:
        raise RowError("`choices` must begin with an object that has `turns`")
    return [Said(_text(turn, "a turn of `choices`"), True) for turn in _listed(first["turns"], "turns")]


def _pair(row: dict[str, Any]) -> list[Said]:
    asked = [key for key in PROMPT_KEYS if key in row]
    # Beside an answer, `text` is as a rule the whole of prompt and answer once more.
    answers = [key for key in ANSWER_KEYS if key in row] or [key for key in TEXT_KEYS if key in row][:1]
    if not asked and not answers:
        raise RowError(f"no conversation, answer or text in it (found: {', '.join(map(str, row)) or 'nothing'})")
    return [Said(_text(row[key], f"`{key}`"), key in answers) for key in asked + answers]


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(f"`{name}` must be a list (found: {type(value).__name__})")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be a text (found: {type(value).__name__})")
    return value
