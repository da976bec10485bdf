"""The temporary folders of replays: one that a killed process left is removed by the next, and no other."""

from __future__ import annotations

import pickle
import subprocess
import tempfile
from pathlib import Path

import pytest

from hdtool.builders.evaluation.job_files import job_files
from hdtool.data.isolated_processes import isolated_python

HOLD = (
    "from hdtool.builders.evaluation.job_files import job_files\nwith job_files([1, 2]):\n print(flush=True)\n input()"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and of those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holding() -> subprocess.Popen[bytes]:
    """A process that has written its jobs, and holds them until it gets a line."""
    process = subprocess.Popen(isolated_python("-c", HOLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline()
    return process


def test_jobs_are_read_and_leave_nothing(place: Path) -> None:
    with job_files(["one", 2]) as files:
        assert [pickle.loads(file.read_bytes()) for file in files] == ["one", 2]
        assert files[0].parent.stat().st_mode & 0o777 == 0o700
    assert not list(place.iterdir())


def test_only_folders_of_killed_replays_are_removed(place: Path) -> None:
    with holding() as running, holding() as killed:
        killed.kill()
        killed.wait()
        held = set(place.iterdir())
        assert len(held) == 2
        (mixed := place / "hdtool-replay-01234567").mkdir()
        for name in ("0", "1", "notes"):
            (mixed / name).write_text("mine")
        (link := place / "hdtool-replay-linkedto").symlink_to(mixed / "..")
        (empty := place / "hdtool-replay-newfolde").mkdir()
        (other := place / "hdtool-replay-results").mkdir()
        (other / "0").write_text("mine")
        with job_files([3]) as files:
            left = set(place.iterdir()) - {files[0].parent}
        assert left - held == {mixed, link, empty, other}
        (of_running,) = left & held
        assert {file.name for file in of_running.iterdir()} == {"0", "1"}
        assert len(list(mixed.iterdir())) == 3 and (other / "0").exists()
        running.communicate(b"\n")
        assert running.returncode == 0 and not of_running.exists()
