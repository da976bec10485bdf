"""Rows of Parquet files, and of Arrow files, in which the library datasets keeps a data set."""

from __future__ import annotations

import glob
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hdtool.data.errors import RecordError, reason_of
from hdtool.data.formats.compression import is_packed
from hdtool.data.formats.row import CountedFile, Row

PARQUET, ARROW = b"PAR1", b"\xff\xff\xff\xff"


@contextmanager
def on_disk(path: Path, stream: io.BufferedReader) -> Iterator[tuple[Path, str]]:
    """A file that is read from any place in it, unpacked if it is compressed, and a folder for scratch files."""
    with tempfile.TemporaryDirectory() as scratch:
        file = path
        if is_packed(stream):
            file = Path(scratch, "unpacked")
            with file.open("wb") as unpacked:
                shutil.copyfileobj(stream, unpacked)
        yield file, scratch


def parquet_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    try:
        from datasets import Dataset
        from pyarrow import parquet
    except ImportError:
        raise RecordError(f"{raw.path} is a Parquet file, which the library datasets reads: install datasets") from None
    with on_disk(raw.path, stream) as (file, scratch):
        place = glob.escape(os.path.abspath(file))
        try:
            count = parquet.read_metadata(file).num_rows
            # load_dataset would contact a server first, and leave a lock per file in the user's cache.
            rows = Dataset.from_parquet(place, cache_dir=scratch, streaming=True)
            for index, row in enumerate(rows):
                yield Row(f"[{index}]", row, raw.size * (index + 1) // count, index + 1)
        except Exception as error:  # pyarrow, fsspec and datasets raise errors of many classes
            raise RecordError(f"{raw.path} cannot be read as Parquet ({reason_of(error)}): fetch it again") from None


def arrow_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    from pyarrow import ArrowException, ipc

    index = 0
    try:
        with ipc.open_stream(stream) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    yield Row(f"[{index}]", row, raw.count, index + 1)
                    index += 1
    except (ArrowException, OSError) as error:
        raise RecordError(f"{raw.path} cannot be read as Arrow ({reason_of(error)}): fetch it again") from None
