"""Input files: found by name, folder or pattern, and read row by row in every format.

The ending of the name gives the format; without a known ending, the first bytes do. Gzip is unpacked. A row is a
JSON value, a Parquet row or a whole text file; `records.py` and `traces.py` interpret it.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hdtool.data.errors import HdtoolError, RecordError, reason_of

FORMATS = {
    "json": (".json",),
    "lines": (".jsonl", ".ndjson"),
    "text": (".txt", ".text", ".md"),
    "parquet": (".parquet",),
}
ENDINGS = {ending: form for form, endings in FORMATS.items() for ending in endings}
PACKED = ".gz"
CHUNK = 1 << 16
BOM = b"\xef\xbb\xbf"


class RowError(ValueError):
    """The reason why a row or a text cannot be used."""


class Row(NamedTuple):
    """A row of a file, its place, and the bytes read up to its end."""

    place: str
    value: Any
    """The parsed value, or a ``RowError``; the rows after it are still read."""
    consumed: int


class CountedFile(io.RawIOBase):
    """Counts and hashes the bytes of a file while they are read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._hash = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._hash.update(memoryview(buffer)[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def sha256(self) -> str:
        return self._hash.hexdigest()


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """The files of names, folders and glob patterns, each once, in the order given."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matches(os.path.expanduser(pattern)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _matches(pattern: str) -> list[Path]:
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
        yield from (path for path in paths if _ending(path) in ENDINGS and path.is_file())


def _ending(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() == PACKED else path).suffix.lower()


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
        raise kind(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None


def rows_of(path: Path, raw: CountedFile, size: int) -> Iterator[Row]:
    """The rows of a file; raises if there is none."""
    row = None
    for row in _rows(path, _unpacked(raw), raw, size):
        yield row
    if row is None:
        raise RecordError(f"{path} is empty: leave it out, or put text in it")


def _unpacked(raw: CountedFile) -> io.BufferedReader:
    stream: io.BufferedReader = io.BufferedReader(raw, CHUNK)
    if stream.peek(2).startswith(b"\x1f\x8b"):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), CHUNK)
    return stream


def _rows(path: Path, stream: io.BufferedReader, raw: CountedFile, size: int) -> Iterator[Row]:
    head = stream.peek(CHUNK)
    form = _format(path, head)
    if form == "parquet":
        yield from _parquet_rows(path, stream, size)
    elif b"\0" in head:
        # Such a file may be a single line of any length.
        raise RecordError(f"{path} holds binary data: give text, JSON or Parquet")
    elif form == "lines":
        yield from _line_rows(stream, raw)
    elif form == "json":
        yield from _json_rows(path, stream, raw, size)
    else:
        yield from _text_row(path, stream.read(), size)


def _format(path: Path, head: bytes) -> str:
    if head.startswith(b"PAR1"):
        return "parquet"
    return ENDINGS.get(_ending(path)) or ("json" if _first_character(head) in (b"[", b"{") else "text")


def _first_character(data: bytes) -> bytes:
    return data.lstrip(BOM + b" \t\r\n")[:1]


def _text_row(path: Path, data: bytes, size: int) -> Iterator[Row]:
    try:
        if (text := decoded(data)).strip():
            yield Row("", text, size)
    except RowError as fault:
        raise RecordError(f"{path} is {fault}: convert it to UTF-8 text, or leave it out") from None


def _line_rows(lines: Iterable[bytes], raw: CountedFile) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            value = parsed(decoded(line))
        except RowError as fault:
            value = fault
        yield Row(f":{number}", value, raw.count)


def _json_rows(path: Path, stream: io.BufferedReader, raw: CountedFile, size: int) -> Iterator[Row]:
    """One JSON value; or JSON Lines, if the first line is a complete value and not an array."""
    opening = _opening(stream)
    if _first_character(opening) != b"[":
        with suppress(RowError):
            parsed(decoded(opening))
            yield from _line_rows(chain(io.BytesIO(opening), stream), raw)
            return
    if not opening.strip():
        return
    try:
        value = parsed(decoded(opening + stream.read()))
    except RowError as fault:
        raise RecordError(
            f"{path} is {fault}; it may be cut off: fetch it again, or name it .jsonl if each line is a record"
        ) from None
    rows = value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        # The file is read already; progress now counts the work on its records.
        yield Row(f"[{index}]", row, size * (index + 1) // len(rows))


def _opening(stream: io.BufferedReader) -> bytes:
    """The first line that is not blank, with the blank lines before it."""
    opening = stream.readline()
    while opening.isspace() and (line := stream.readline()):
        opening += line
    return opening


def parsed(text: str) -> Any:
    """The JSON value in a text; raises a ``RowError`` if there is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})") from None
    except ValueError as error:
        raise RowError(f"not valid JSON ({error})") from None
    except RecursionError:
        raise RowError("JSON that is nested too deeply") from None


def decoded(data: bytes) -> str:
    """UTF-8 text; raises a ``RowError`` if it is none."""
    if b"\0" in data:
        raise RowError("binary data")
    try:
        return data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None


def _parquet_rows(path: Path, stream: io.BufferedReader, size: int) -> Iterator[Row]:
    try:
        from datasets import Dataset
        from pyarrow import parquet
    except ImportError:
        raise RecordError(f"{path} is a Parquet file, which the library datasets reads: install datasets") from None
    with tempfile.TemporaryDirectory() as scratch:
        file = path
        if isinstance(stream.raw, gzip.GzipFile):
            # Parquet is read from its end, which a stream does not allow.
            file = Path(scratch, "unpacked.parquet")
            with file.open("wb") as unpacked:
                shutil.copyfileobj(stream, unpacked)
        place = glob.escape(os.path.abspath(file))
        try:
            count = parquet.read_metadata(file).num_rows
            # load_dataset would contact a server first, and leave a lock per file in the user's cache.
            rows = Dataset.from_parquet(place, cache_dir=scratch, streaming=True)
            for index, row in enumerate(rows):
                yield Row(f"[{index}]", row, size * (index + 1) // count)
        except Exception as error:  # pyarrow, fsspec and datasets raise errors of many classes
            raise RecordError(f"{path} cannot be read as Parquet ({reason_of(error)}): fetch it again") from None
