"""The rows of an input file: its format is known by the ending of its name or else by its first bytes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from hdtool.data.errors import RecordError
from hdtool.data.formats.compression import CHUNK, PACKED, unpacked
from hdtool.data.formats.json_rows import first_character, json_rows, line_rows
from hdtool.data.formats.llm_database import SQLITE, database_rows, is_log_of_llm
from hdtool.data.formats.row import CountedFile, Row, RowError, decoded
from hdtool.data.formats.server_log import is_server_log, log_rows
from hdtool.data.formats.tables import ARROW, PARQUET, arrow_rows, parquet_rows

FORMATS = {
    "json": (".json",),
    "lines": (".jsonl", ".ndjson"),
    "text": (".txt", ".text", ".md"),
    "parquet": (".parquet",),
}
ENDINGS = {ending: form for form, endings in FORMATS.items() for ending in endings}
MAGIC = {PARQUET: "parquet", SQLITE: "database", ARROW: "arrow"}


def rows_of(raw: CountedFile, *, text_lines: bool = False) -> Iterator[Row]:
    """The rows of a file; raises if there is none. With ``text_lines``, each line of a text is a row."""
    stream = unpacked(raw)
    head = stream.peek(CHUNK)
    form = _format(raw.path, head)
    if form not in MAGIC.values() and b"\0" in head:
        # Such a file may be a single line of any length.
        raise RecordError(f"{raw.path} holds binary data: give text, JSON, Parquet or a SQLite database of llm")
    row = None
    for row in READERS["text lines" if form == "text" and text_lines else form](raw, stream):
        yield row
    if row is None:
        raise RecordError(f"{raw.path} is empty: leave it out, or put text in it")


def ending_of(path: Path) -> str:
    """The ending of a name without that of its compression."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()


def holds_conversations(path: Path) -> bool:
    """Whether a file begins as JSON, as a server's log, or is a database of ``llm`` or an Arrow file."""
    try:
        with CountedFile(path) as raw:
            form = _format(path, unpacked(raw).peek(CHUNK))
        return is_log_of_llm(path) if form == "database" else form != "text"
    except (OSError, EOFError, zlib.error):
        return False


def _format(path: Path, head: bytes) -> str:
    for magic, form in MAGIC.items():
        if head.startswith(magic):
            return form
    if known := ENDINGS.get(ending_of(path)):
        return known
    first = first_character(head)
    if first != b"{" and is_server_log(head):
        return "log"
    return "json" if first in (b"[", b"{") else "text"


def _text_row(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    try:
        if (text := decoded(stream.read())).strip():
            yield Row("", text, raw.size)
    except RowError as fault:
        raise RecordError(f"{raw.path} is {fault}: convert it to UTF-8 text, or leave it out") from None


def _text_lines(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        try:
            value: str | RowError = decoded(line).removesuffix("\n").removesuffix("\r")
        except RowError as fault:
            value = fault
        if isinstance(value, RowError) or value.strip():
            yield Row(f":{number}", value, raw.count, number)


READERS: dict[str, Callable[[CountedFile, io.BufferedReader], Iterator[Row]]] = {
    "json": json_rows,
    "lines": line_rows,
    "text": _text_row,
    "text lines": _text_lines,
    "log": log_rows,
    "parquet": parquet_rows,
    "database": database_rows,
    "arrow": arrow_rows,
}
