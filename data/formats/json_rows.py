"""Rows of JSON Lines and of JSON values, and of lines that have something before their JSON."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from hdtool.data.errors import RecordError
from hdtool.data.formats.row import BOM, CountedFile, Row, RowError, decoded, parsed

PREFIX = re.compile(r'(?:\[[^\[\]{}"]*\]|[^\[\]{}"])+(?=\{")')
"""What a logger writes before an object: a time, a level, a name."""


def line_rows(raw: CountedFile, lines: Iterable[bytes]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        yield Row(f":{number}", value_of_line(line), raw.count, number)


def value_of_line(line: bytes) -> Any:
    """The JSON value of a line, after a prefix if there is one; a ``RowError`` instead of raising it."""
    try:
        text = decoded(line)
        try:
            return parsed(text)
        except RowError:
            if (prefix := PREFIX.match(text)) is None:
                raise
            with suppress(RowError):
                return parsed(text[prefix.end() :])
            raise
    except RowError as fault:
        return fault


def json_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    """One JSON value; or JSON Lines, if the first line is a complete value and not an array."""
    opening = _opening(stream)
    if first_character(opening) != b"[":
        with suppress(RowError):
            parsed(decoded(opening))
            yield from line_rows(raw, chain(io.BytesIO(opening), stream))
            return
    if not opening.strip():
        return
    try:
        value = parsed(decoded(opening + stream.read()))
    except RowError as fault:
        raise RecordError(
            f"{raw.path} is {fault}; it may be cut off: fetch it again, or name it .jsonl if each line is a record"
        ) from None
    rows = value if isinstance(value, list) and not is_conversation(value) else [value]
    for index, row in enumerate(rows):
        # The file is read already; progress now counts the work on its records.
        yield Row(f"[{index}]", row, raw.size * (index + 1) // len(rows), index + 1)


def is_conversation(value: Any) -> bool:
    """Whether a list holds the messages of one conversation, and not one record each."""
    messages = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return (
        messages and len(value) > 1 and all("role" in one and {"content", "tool_calls"} & one.keys() for one in value)
    )


def first_character(data: bytes) -> bytes:
    return data.lstrip(BOM + b" \t\r\n")[:1]


def _opening(stream: io.BufferedReader) -> bytes:
    """The first line that is not blank, with the blank lines before it."""
    opening = stream.readline()
    while opening.isspace() and (line := stream.readline()):
        opening += line
    return opening
