"""A row of an input file, and the values that text and bytes stand for."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

BOM = b"\xef\xbb\xbf"


class RowError(ValueError):
    """The reason why a row or a text cannot be used."""


class Row(NamedTuple):
    """A row of a file, its place, and the bytes read up to its end."""

    place: str
    """What follows the name of the file in messages: ``:7`` or ``[6]``."""
    value: Any
    """The parsed value, or a ``RowError``; the rows after it are still read."""
    consumed: int
    number: int = 1
    """The line, or the place in a list, from 1."""


class CountedFile(io.RawIOBase):
    """An input file; counts its bytes while they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None  # Python closes what could not be opened, too
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
