"""Input files: found by path, folder or name on the hub, and read as rows whatever their format.

The library datasets downloads a data set once and keeps it as Arrow files in its cache, which are read like any other
input.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hdtool.data.errors import HdtoolError, PromptError, RecordError, reason_of
from hdtool.data.logs import SQLITE, database_rows, is_log_of_llm, is_server_log, log_rows
from hdtool.data.row_readers import (
    ARROW,
    CHUNK,
    PACKED,
    PARQUET,
    CountedFile,
    Row,
    RowError,
    arrow_rows,
    decoded,
    first_character,
    json_rows,
    line_rows,
    parquet_rows,
    unpacked,
)

START = "hf:"
DEFAULT_SPLIT = "train"
NAME = re.compile(r"(?P<name>[^/:]+/[^/:]+)(?:/(?P<config>[^/:]+))?(?::(?P<split>.+))?")


def is_hub_name(name: str) -> bool:
    return name.startswith(START)


def files_of(name: str) -> list[Path]:
    """The files of a split of a data set, downloaded if the cache lacks them."""
    found = NAME.fullmatch(name.removeprefix(START))
    if found is None:
        raise RecordError(
            f"{name} is no name of a data set: write it as hf:OWNER/NAME, hf:OWNER/NAME/CONFIG or with :SPLIT"
        )
    from datasets import load_dataset

    try:
        split = load_dataset(found["name"], found["config"], split=found["split"] or DEFAULT_SPLIT)
    except Exception as error:  # datasets, huggingface_hub and the formats raise errors of many classes
        raise RecordError(
            f"{name} cannot be loaded ({reason_of(error)}): check the name and the network, or name a split as in "
            f"{START}{found['name']}:SPLIT"
        ) from None
    if not (files := [Path(file["filename"]) for file in split.cache_files]):
        raise RecordError(f"{name} holds no rows: name another split")
    return list(dict.fromkeys(files))


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


MAYBE = (".log", ".db", ".sqlite", ".sqlite3", ".arrow")
"""Endings of files that many programs write."""


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """The files of names, folders, glob patterns and data sets of the hub, each once, in the order given."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matches(os.path.expanduser(pattern)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _matches(pattern: str) -> list[Path]:
    if is_hub_name(pattern) and not os.path.exists(pattern):
        return files_of(pattern)
    if os.path.isdir(pattern):
        if not (files := sorted(_files_in(pattern))):
            raise RecordError(f"{pattern} holds no files to read: name files, or put {', '.join(ENDINGS)} in it")
    # A file name may contain the characters of a pattern.
    elif os.path.exists(pattern):
        files = [Path(pattern)]
    elif not (files := sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))):
        raise RecordError(f"{pattern or 'an empty name'} matches no file: check the path")
    return files


def _files_in(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and _is_input(path))


def _is_input(path: Path) -> bool:
    """Whether a file of a folder is read by the ending of its name; logs and databases also by their content."""
    ending = ending_of(path)
    return ending in ENDINGS or (ending in MAYBE and holds_conversations(path))


def text_in(path: Path, advice: str) -> str:
    """The text of a file that a prompt needs; the error of one without text ends with ``advice``."""
    with faults_named(path, PromptError):
        data = path.read_bytes()
    try:
        return decoded(data)
    except RowError as fault:
        raise PromptError(f"{path} is {fault}: {advice}") from None


@contextmanager
def faults_named(path: Path, kind: type[HdtoolError] = RecordError) -> Iterator[None]:
    """Word the errors of opening and reading a file."""
    try:
        yield
    except FileNotFoundError:
        raise kind(f"{path} does not exist: check the path") from None
    except IsADirectoryError:
        raise kind(f"{path} is a folder: name the files in it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise kind(f"{path} cannot be unpacked ({error}): fetch it again") from None
    except OSError as error:
        if error.errno is None:  # of pyarrow, which unpacks Zstandard
            raise kind(f"{path} cannot be unpacked ({error}): fetch it again") from None
        raise kind(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None
