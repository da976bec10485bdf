"""Read rows of JSON, JSON Lines, Parquet and Arrow files, and compress and decompress streams."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from hdtool.data.errors import RecordError, error_reason

READ_BYTES = 1 << 16
COMPRESSED_ENDINGS = (".gz", ".zst")
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def decompressed(raw: io.RawIOBase) -> io.BufferedReader:
    """Return a stream of a file's content, decompressed if it is gzip or Zstandard."""
    stream: io.BufferedReader[Any] = io.BufferedReader(raw, READ_BYTES)
    head = stream.peek(len(ZSTD_MAGIC))
    if head.startswith(GZIP_MAGIC):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), READ_BYTES)
    if head.startswith(ZSTD_MAGIC):
        # Python has Zstandard from 3.14 on; pyarrow, which Parquet needs anyway, has it too.
        from pyarrow import CompressedInputStream

        return io.BufferedReader(CompressedInputStream(stream, "zstd"), READ_BYTES)
    return stream


def is_compressed(stream: io.BufferedReader) -> bool:
    """Return True if a stream returned by ``decompressed`` reads compressed data."""
    return not isinstance(stream.raw, io.RawIOBase) or isinstance(stream.raw, gzip.GzipFile)


@contextmanager
def compressed(stream: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Yield a stream that writes to ``stream`` and compresses the data if ``path`` ends with ``.gz`` or ``.zst``."""
    ending = path.suffix.lower()
    if ending == ".gz":
        # Without a timestamp and a name, equal content gives equal bytes.
        with gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as file:
            yield file  # type: ignore[misc]
    elif ending == ".zst":
        from pyarrow import CompressedOutputStream, PythonFile

        own = os.fdopen(os.dup(stream.fileno()), "wb")  # ``stream`` stays open when the compressor closes this file
        with CompressedOutputStream(PythonFile(own, "w"), "zstd") as file:
            yield file
    else:
        yield stream


UTF8_BOM = b"\xef\xbb\xbf"


class RowError(ValueError):
    """Raised when a row or a text cannot be used; the message is the reason."""


class FileRow(NamedTuple):
    """Row of an input file, with its location."""

    location: str
    """Suffix of the file name in messages, such as ``:7`` or ``[6]``."""
    value: Any
    """Parsed value, or a RowError if the row cannot be parsed. Later rows are still read."""
    consumed: int
    number: int = 1
    """Line number, or position in a list, from 1."""


class CountedFile(io.RawIOBase):
    """Input file that counts the bytes read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None  # Python calls close() even if opening fails
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._file
        count = self._file.readinto(buffer)
        self.count += count
        return count

    def close(self) -> None:
        if self._file:
            self._file.close()
        super().close()


def parse_json(text: str) -> Any:
    """Parse JSON; raise RowError if the text is not valid JSON, is nested too deeply, or has too long a number."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})") from None
    except ValueError as error:
        raise RowError(f"not valid JSON ({error})") from None
    except RecursionError:
        raise RowError("JSON that is nested too deeply") from None


def decode_utf8(data: bytes) -> str:
    """Decode UTF-8 text, dropping a byte order mark; raise RowError if the data are binary or not valid UTF-8."""
    if b"\0" in data:
        raise RowError("binary data")
    try:
        return data.removeprefix(UTF8_BOM).decode()
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None


LOGGER_PREFIX = re.compile(r'(?:\[[^\[\]{}"]*\]|[^\[\]{}"])+(?=\{")')
"""Prefix that a logger writes before a JSON object, such as a time, a level and a name."""


def line_rows(raw: CountedFile, lines: Iterable[bytes]) -> Iterator[FileRow]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        yield FileRow(f":{number}", line_value(line), raw.count, number)


def line_value(line: bytes) -> Any:
    """Parse the JSON value in a line, skipping a logger's prefix; on failure, return a RowError without raising it."""
    try:
        text = decode_utf8(line)
        try:
            return parse_json(text)
        except RowError:
            if (prefix := LOGGER_PREFIX.match(text)) is None:
                raise
            with suppress(RowError):
                return parse_json(text[prefix.end() :])
            raise
    except RowError as fault:
        return fault


def json_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    """Yield a row per item of a JSON array or per line of JSON Lines, or one row for any other JSON value.

    An array with the messages of one conversation is one row. A file whose first line is a complete value, but not an
    array, is read as JSON Lines. Raise RecordError if the JSON is invalid.
    """
    opening = _first_lines(stream)
    if first_byte(opening) != b"[":
        with suppress(RowError):
            parse_json(decode_utf8(opening))
            yield from line_rows(raw, chain(io.BytesIO(opening), stream))
            return
    if not opening.strip():
        return
    try:
        value = parse_json(decode_utf8(opening + stream.read()))
    except RowError as fault:
        raise RecordError(
            f"{raw.path} is {fault}; it may be cut off: fetch it again, or name it .jsonl if each line is a record"
        ) from None
    rows = value if isinstance(value, list) and not is_conversation(value) else [value]
    for index, row in enumerate(rows):
        # The whole file has been read, so show how many of its records have been processed.
        yield FileRow(f"[{index}]", row, raw.size * (index + 1) // len(rows), index + 1)


def is_conversation(value: Any) -> bool:
    """Return True if a value is a list of several messages, which is one conversation and not one record per item."""
    messages = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return (
        messages
        and len(value) > 1
        and all("role" in item and {"content", "tool_calls"} & item.keys() for item in value)
    )


def first_byte(data: bytes) -> bytes:
    return data.lstrip(UTF8_BOM + b" \t\r\n")[:1]


def _first_lines(stream: io.BufferedReader) -> bytes:
    """Return the stream's first lines up to and including the first one that is not blank."""
    opening = stream.readline()
    while opening.isspace() and (line := stream.readline()):
        opening += line
    return opening


PARQUET_MAGIC, ARROW_MAGIC = b"PAR1", b"\xff\xff\xff\xff"


@contextmanager
def as_file_on_disk(path: Path, stream: io.BufferedReader) -> Iterator[tuple[Path, str]]:
    """Yield ``(file, scratch)``: a seekable file, decompressed if necessary, and a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        file = path
        if is_compressed(stream):
            file = Path(scratch, "unpacked")
            with file.open("wb") as unpacked:
                shutil.copyfileobj(stream, unpacked)
        yield file, scratch


def parquet_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    from datasets import Dataset
    from pyarrow import parquet

    with as_file_on_disk(raw.path, stream) as (file, scratch):
        pattern = glob.escape(os.path.abspath(file))
        try:
            count = parquet.read_metadata(file).num_rows
            # load_dataset would contact a server first and leave a lock per file in the user's cache.
            rows = Dataset.from_parquet(pattern, cache_dir=scratch, streaming=True)
            # Decoding a column of images or sounds would open the files and addresses that it names.
            for index, row in enumerate(rows.decode(False)):
                yield FileRow(f"[{index}]", row, raw.size * (index + 1) // count, index + 1)
        except Exception as error:  # pyarrow, fsspec and datasets raise many classes of errors
            raise RecordError(f"{raw.path} cannot be read as Parquet ({error_reason(error)}): fetch it again") from None


def arrow_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    from pyarrow import ArrowException, ipc

    index = 0
    try:
        with ipc.open_stream(stream) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    yield FileRow(f"[{index}]", row, raw.count, index + 1)
                    index += 1
    except (ArrowException, OSError) as error:
        raise RecordError(f"{raw.path} cannot be read as Arrow ({error_reason(error)}): fetch it again") from None
