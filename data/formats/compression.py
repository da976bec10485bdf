"""Gzip and Zstandard: recognised by their first bytes on reading, by the ending of the name on writing."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 16
PACKED = (".gz", ".zst")
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def unpacked(raw: io.RawIOBase) -> io.BufferedReader:
    """The content of a file, which may be compressed."""
    stream: io.BufferedReader[Any] = io.BufferedReader(raw, CHUNK)
    head = stream.peek(len(ZSTD))
    if head.startswith(GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), CHUNK)
    if head.startswith(ZSTD):
        # pyarrow, which Parquet needs anyway, has Zstandard; Python has it from 3.14 on.
        from pyarrow import CompressedInputStream

        return io.BufferedReader(CompressedInputStream(stream, "zstd"), CHUNK)
    return stream


def is_packed(stream: io.BufferedReader) -> bool:
    """Whether a stream of ``unpacked`` decompresses."""
    return not isinstance(stream.raw, io.RawIOBase) or isinstance(stream.raw, gzip.GzipFile)


@contextmanager
def packed(stream: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """A stream that compresses into another one as the ending of the name asks for."""
    ending = path.suffix.lower()
    if ending == ".gz":
        # Without a time and a name, equal content gives equal bytes.
        with gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as file:
            yield file  # type: ignore[misc]
    elif ending == ".zst":
        from pyarrow import CompressedOutputStream, PythonFile

        with CompressedOutputStream(PythonFile(_LeftOpen(stream), "w"), "zstd") as file:
            yield file
    else:
        yield stream


class _LeftOpen(io.RawIOBase):
    """A stream that stays open when the one that compresses into it is closed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)
