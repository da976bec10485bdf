"""Input files: found by name, folder, pattern or name of a data set, and how errors of reading them are worded."""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hdtool.data.errors import HdtoolError, PromptError, RecordError
from hdtool.data.formats.hub import files_of, is_hub_name
from hdtool.data.formats.row import RowError, decoded
from hdtool.data.formats.rows import ENDINGS, ending_of, holds_conversations

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
