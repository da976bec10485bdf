"""Find input files by path, folder, glob or hub name, and read their rows in any supported format."""

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

from hdtool.data.errors import HdtoolError, PromptError, RecordError, did_you_mean, error_reason
from hdtool.data.logs import SQLITE_MAGIC, database_rows, is_log_of_llm, is_server_log, log_rows
from hdtool.data.row_readers import (
    ARROW_MAGIC,
    COMPRESSED_ENDINGS,
    PARQUET_MAGIC,
    READ_BYTES,
    CountedFile,
    FileRow,
    RowError,
    arrow_rows,
    decode_utf8,
    decompressed,
    first_byte,
    json_rows,
    line_rows,
    parquet_rows,
)

HUB_PREFIX = "hf:"
DEFAULT_SPLIT = "train"
HUB_DATASET_NAME = re.compile(r"(?P<name>[^/:]+/[^/:]+)(?:/(?P<config>[^/:]+))?(?::(?P<split>.+))?")


def is_hub_name(name: str) -> bool:
    return name.startswith(HUB_PREFIX)


def hub_files(name: str) -> list[Path]:
    """Return the cached files of a data set's split, downloaded if needed, or raise RecordError if there are none."""
    match = HUB_DATASET_NAME.fullmatch(name.removeprefix(HUB_PREFIX))
    if match is None:
        raise RecordError(
            f"{name} is no name of a data set: write it as hf:OWNER/NAME, hf:OWNER/NAME/CONFIG or with :SPLIT"
        )
    from datasets import load_dataset

    try:
        split = load_dataset(match["name"], match["config"], split=match["split"] or DEFAULT_SPLIT)
    except Exception as error:  # datasets, huggingface_hub and the file formats raise many classes of errors
        raise RecordError(
            f"{name} cannot be loaded ({error_reason(error)}): check the name and the network, or name a split as in "
            f"{HUB_PREFIX}{match['name']}:SPLIT"
        ) from None
    if not (files := [Path(file["filename"]) for file in split.cache_files]):
        raise RecordError(f"{name} holds no rows: name another split")
    return list(dict.fromkeys(files))


FORMAT_ENDINGS = {
    "json": (".json",),
    "lines": (".jsonl", ".ndjson"),
    "text": (".txt", ".text", ".md"),
    "parquet": (".parquet",),
}
FORMAT_BY_ENDING = {ending: form for form, endings in FORMAT_ENDINGS.items() for ending in endings}
FORMAT_BY_MAGIC = {PARQUET_MAGIC: "parquet", SQLITE_MAGIC: "database", ARROW_MAGIC: "arrow"}


def read_rows(raw: CountedFile, *, text_lines: bool = False) -> Iterator[FileRow]:
    """Yield the rows of a file; raise RecordError if it has none or is of an unknown binary format.

    If ``text_lines`` is True, each line of a text file is a row.
    """
    stream = decompressed(raw)
    head = stream.peek(READ_BYTES)
    form = _format(raw.path, head)
    if form not in FORMAT_BY_MAGIC.values() and b"\0" in head:
        # A binary file may be a single line of any length.
        raise RecordError(f"{raw.path} holds binary data: give text, JSON, Parquet or a SQLite database of llm")
    row = None
    for row in ROW_READERS["text lines" if form == "text" and text_lines else form](raw, stream):
        yield row
    if row is None:
        raise RecordError(f"{raw.path} is empty: leave it out, or put text in it")


def format_ending(path: Path) -> str:
    """Return the file name's suffix in lower case, ignoring ``.gz`` and ``.zst``."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED_ENDINGS else path).suffix.lower()


def holds_conversations(path: Path) -> bool:
    """Return True if a file is JSON, a server log, Parquet, Arrow, or a database of the ``llm`` tool."""
    try:
        with CountedFile(path) as raw:
            form = _format(path, decompressed(raw).peek(READ_BYTES))
        return is_log_of_llm(path) if form == "database" else form != "text"
    except (OSError, EOFError, zlib.error):
        return False


def _format(path: Path, head: bytes) -> str:
    for magic, form in FORMAT_BY_MAGIC.items():
        if head.startswith(magic):
            return form
    if known := FORMAT_BY_ENDING.get(format_ending(path)):
        return known
    first = first_byte(head)
    if first != b"{" and is_server_log(head):
        return "log"
    return "json" if first in (b"[", b"{") else "text"


def _text_row(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    try:
        if (text := decode_utf8(stream.read())).strip():
            yield FileRow("", text, raw.size)
    except RowError as fault:
        raise RecordError(f"{raw.path} is {fault}: convert it to UTF-8 text, or leave it out") from None


def _text_lines(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    for number, line in enumerate(stream, start=1):
        try:
            value: str | RowError = decode_utf8(line).removesuffix("\n").removesuffix("\r")
        except RowError as fault:
            value = fault
        if isinstance(value, RowError) or value.strip():
            yield FileRow(f":{number}", value, raw.count, number)


ROW_READERS: dict[str, Callable[[CountedFile, io.BufferedReader], Iterator[FileRow]]] = {
    "json": json_rows,
    "lines": line_rows,
    "text": _text_row,
    "text lines": _text_lines,
    "log": log_rows,
    "parquet": parquet_rows,
    "database": database_rows,
    "arrow": arrow_rows,
}


AMBIGUOUS_ENDINGS = (".log", ".db", ".sqlite", ".sqlite3", ".arrow")
"""Suffixes that unrelated files have too, so that the content decides whether a file is an input."""


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """Expand paths, folders, globs and hub data sets to files, in order and without duplicates.

    Raise RecordError if one of them matches no file.
    """
    paths_by_target: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matching_files(os.path.expanduser(pattern)):
            paths_by_target.setdefault(path.resolve(), path)
    return list(paths_by_target.values())


def _matching_files(pattern: str) -> list[Path]:
    if is_hub_name(pattern) and not os.path.exists(pattern):
        return hub_files(pattern)
    if os.path.isdir(pattern):
        if not (files := sorted(_files_in(pattern))):
            raise RecordError(
                f"{pattern} holds no files to read: name files, or put {', '.join(FORMAT_BY_ENDING)} in it"
            )
    # A file name may contain glob characters.
    elif os.path.exists(pattern):
        files = [Path(pattern)]
    elif not (files := sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))):
        raise RecordError(f"{pattern or 'an empty name'} matches no file{_near(pattern)}: check the path")
    return files


def _near(pattern: str) -> str:
    """Suggest the most similar name in the folder of a missing file, or say that there is no such folder."""
    folder, name = os.path.split(pattern)
    if not folder or os.path.isdir(folder):
        return did_you_mean(name, glob.glob("*", root_dir=folder or None))
    return "" if glob.has_magic(folder) else f" ({folder} is no folder)"


def _files_in(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and _is_input(path))


def _is_input(path: Path) -> bool:
    """Return True if a file in a folder counts as input, judged by its suffix or, for some suffixes, by its content."""
    ending = format_ending(path)
    return ending in FORMAT_BY_ENDING or (ending in AMBIGUOUS_ENDINGS and holds_conversations(path))


def read_text(path: Path, advice: str) -> str:
    """Return the text of a file; raise PromptError if it cannot be read or, with ``advice``, if it is not UTF-8."""
    with input_errors_as(path, PromptError):
        data = path.read_bytes()
    try:
        return decode_utf8(data)
    except RowError as fault:
        raise PromptError(f"{path} is {fault}: {advice}") from None


@contextmanager
def input_errors_as(path: Path, kind: type[HdtoolError] = RecordError) -> Iterator[None]:
    """Re-raise errors from opening, reading or decompressing a file as ``kind``, with advice in the message."""
    try:
        yield
    except FileNotFoundError:
        raise kind(f"{path} does not exist: check the path") from None
    except IsADirectoryError:
        raise kind(f"{path} is a folder: name the files in it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise kind(f"{path} cannot be unpacked ({error}): fetch it again") from None
    except OSError as error:
        if error.errno is None:  # raised by pyarrow, which decompresses Zstandard
            raise kind(f"{path} cannot be unpacked ({error}): fetch it again") from None
        raise kind(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None
