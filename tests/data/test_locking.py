"""Lock files: one holder at a time, and nothing of anybody else's is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import ResultError, StoreError

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
