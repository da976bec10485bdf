"""Lock files: one holder at a time, and nothing of anybody else's is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import ResultError, StoreError
from tests.support.locks import deleted_lock_files

BUSY = StoreError("the lock is held: wait for it")


def test_a_second_holder_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    first, second = (file_lock(tmp_path / ".lock", BUSY) for _ in range(2))
    with first, pytest.raises(StoreError, match="the lock is held"), second:
        pass
    with file_lock(tmp_path / ".lock", BUSY):
        assert (tmp_path / ".lock").read_bytes() == b""


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / ".lock", BUSY):
        _ = 1 / 0
    with file_lock(tmp_path / ".lock", BUSY):
        pass


def test_a_file_with_content_is_neither_truncated_nor_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    lock = file_lock(tmp_path / ".lock", ResultError("held"))
    with pytest.raises(ResultError, match="has 4 bytes, so it is not a lock file"), lock:
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_is_not_followed(target: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    (tmp_path / ".lock").symlink_to(tmp_path / target)
    with pytest.raises(StoreError, match="is a link"), file_lock(tmp_path / ".lock", BUSY):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(StoreError, match="is not a regular file"), file_lock(tmp_path / ".lock", BUSY):
        pass


def test_a_lock_file_is_deleted_while_it_is_held(tmp_path: Path) -> None:
    with deleted_lock_files() as deleted, file_lock(tmp_path / ".lock", BUSY, remove=True):
        assert (tmp_path / ".lock").exists()
    assert deleted == [tmp_path / ".lock"] and not list(tmp_path.iterdir())


def test_an_error_inside_keeps_the_lock_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / ".lock", BUSY, remove=True):
        _ = 1 / 0
    assert (tmp_path / ".lock").exists()


def test_a_file_that_was_deleted_before_it_was_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes its lock file between the opening of the file and its locking."""
    fcntl, path = pytest.importorskip("fcntl"), tmp_path / ".lock"
    flock, opened = fcntl.flock, list[int]()

    def late(descriptor: int, operation: int) -> None:
        if not opened:
            path.unlink()
        opened.append(descriptor)
        flock(descriptor, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        lock = file_lock(path, BUSY, seconds=10)
        lock.__enter__()
    with pytest.raises(StoreError, match="the lock is held"), file_lock(path, BUSY):
        pass
    lock.__exit__(None, None, None)
    assert len(opened) > 1
