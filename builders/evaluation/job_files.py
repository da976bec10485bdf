"""Files that hand the jobs of a replay to worker processes, in a temporary folder that the replay locks."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from hdtool.data.errors import HdtoolError, os_errors_as
from hdtool.data.output_files import lock

PREFIX = "hdtool-replay-"
FOLDER_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")


@contextmanager
def job_files(jobs: Sequence[object]) -> Iterator[list[Path]]:
    """Pickle each job to a temporary file; yield the files' paths. Folders that killed replays left are removed."""
    with ExitStack() as stack:
        with os_errors_as(
            HdtoolError,
            "the jobs of the replay cannot be written to a temporary folder",
            "let TMPDIR name a folder with room, or use --workers 1",
        ):
            _remove_left_folders()
            folder = Path(stack.enter_context(TemporaryDirectory(prefix=PREFIX)))
            stack.enter_context(_locked(folder, wait=True))
            files = _files(folder, len(jobs))
            for job, file in zip(jobs, files, strict=True):
                file.write_bytes(pickle.dumps(job))
        yield files


def _files(folder: Path, number: int) -> list[Path]:
    return [folder / str(index) for index in range(number)]


def _remove_left_folders() -> None:
    """Remove the folders of killed processes of this user: those that are not locked and hold jobs and nothing else.

    Empty folders stay, because another process may be about to lock one.
    """
    with suppress(OSError):
        for folder in Path(gettempdir()).iterdir():
            if FOLDER_NAME.fullmatch(folder.name):
                with suppress(OSError), _locked(folder, wait=False) as is_left:
                    files = sorted(folder.iterdir())
                    if is_left and files and files == sorted(_files(folder, len(files))):
                        for file in files:
                            file.unlink()
                        folder.rmdir()


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder during the block; yield False if it is another user's, or locked already, or on Windows."""
    if os.name == "nt":  # where folders cannot be opened
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield os.fstat(descriptor).st_uid == os.getuid() and lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)
