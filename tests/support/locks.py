"""Checks on how lock files are deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import ResultError


@contextmanager
def deleted_lock_files() -> Iterator[list[Path]]:
    """Yield the list of the lock files that the block deletes; each must be locked when it is deleted."""
    unlink, deleted = Path.unlink, list[Path]()

    def checked(path: Path, missing_ok: bool = False) -> None:
        if (path.name == "lock" or path.name.endswith(".lock")) and path.exists():
            with pytest.raises(ResultError, match="held"), file_lock(path, ResultError("held")):
                pass
            deleted.append(path)
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "unlink", checked)
        yield deleted
