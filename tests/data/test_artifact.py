"""Artifacts are made once from their sources, are whole or made again, and hold only what hdtool wrote."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hdtool.data.artifact import MANIFEST, Artifact, artifacts
from hdtool.data.durable_files import file_lock, lock_path
from hdtool.data.errors import ModelError
from tests.support.artifacts import NOTES, join, joined
from tests.support.project import ROOT

pytestmark = pytest.mark.usefixtures("home")
NOTE = "note.txt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.bin"
    file.write_bytes(b"A first content")
    return file


def content(artifact: Artifact) -> bytes:
    return (artifact.folder / "content").read_bytes()


def folders(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("*/*") if path.is_dir())


def test_it_is_made_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = joined(source)
    assert content(made) == source.read_bytes() and made.fingerprint == "89abcdef"
    assert capfd.readouterr().err == f"note: joining source.bin in {made.folder}, once\n"
    assert joined(source) == made and not capfd.readouterr().err
    assert [*artifacts("joined")] == [made] and made.bytes == len(content(made)) + len(NOTES)


@pytest.mark.parametrize("way", [shutil.move, shutil.copy2])
def test_a_moved_source_and_a_copy_are_recognized(way: Callable[[Path, Path], object], source: Path) -> None:
    made, other = joined(source), source.with_name("other.bin")
    way(source, other)
    assert joined(other, make=lambda *_: pytest.fail("it was made again")).folder == made.folder
    (kept,) = artifacts("joined")
    assert all(state.holds for state in kept.sources)


@pytest.mark.parametrize(
    ("text", "later"), [(b"B first content", 0), (b"A longer content", 0), (b"A first CONTENT", 1)]
)
def test_a_changed_source_gives_another_artifact(text: bytes, later: int, source: Path, home: Path) -> None:
    first, other_kind, before = joined(source), joined(source, kind="joined-twice"), source.stat()
    (first.folder / NOTE).write_text("mine")
    source.write_bytes(text)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + later))
    second = joined(source)
    assert content(second) == text and [*folders(home)] == sorted([first.folder, second.folder, other_kind.folder])
    assert [path.name for path in first.folder.iterdir()] == [NOTE]
    third = joined(source, version=2)
    assert {third.folder, other_kind.folder} == {artifact.folder for artifact in artifacts("joined")}


def manifest_with(artifact: Artifact, **changed: Any) -> None:
    file = artifact.folder / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


DAMAGES: dict[str, Callable[[Artifact], object]] = {
    "another content": lambda artifact: (artifact.folder / "content").write_bytes(b"A first cOntent"),
    "cut short": lambda artifact: os.truncate(artifact.folder / "content", 5),
    "a file is gone": lambda artifact: (artifact.folder / "notes").unlink(),
    "no manifest": lambda artifact: (artifact.folder / MANIFEST).unlink(),
    "an empty manifest": lambda artifact: os.truncate(artifact.folder / MANIFEST, 0),
    "no numbers": partial(manifest_with, files={"content": ["0", "x"]}),
}
DAMAGES |= {
    f"lists {name!r}": partial(manifest_with, files={name: [4, 0]})
    for name in ("../thesis.txt", "/tmp/thesis.txt", "..", ".", "", "a\0b")
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_damaged_is_made_again(
    damage: Callable[[Artifact], object], source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = joined(source)
    (made.folder / NOTE).write_text("mine")
    thesis = made.folder.parent / "thesis.txt"
    thesis.write_text("mine")
    damage(made)
    again = joined(source)
    assert content(again) == source.read_bytes() and again.folder == made.folder
    assert capfd.readouterr().err.endswith(", again, as it was damaged\n")
    assert joined(source) == again and not capfd.readouterr().err
    damage(made)
    if damaged := Artifact.read(made.folder):
        damaged.remove()
        assert not (made.folder / MANIFEST).exists() and (made.folder / NOTE).is_file()
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize("text", ['{"artifact": "of a museum"}', '{"kind": "joi'])
def test_a_foreign_manifest_stays(text: str, source: Path) -> None:
    made = joined(source)
    foreign = made.folder / MANIFEST
    foreign.write_text(text)
    with pytest.raises(ModelError, match=f"^{foreign} is there and is not a manifest of hdtool: move it away$"):
        joined(source, make=lambda *_: pytest.fail("it was made in vain"))
    assert foreign.read_text() == text and content(made)


def full(folder: Path, _: Path) -> dict[str, Any]:
    (folder / "content").write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_and_a_home_that_cannot_be_written(source: Path, home: Path) -> None:
    advice = "make room, or let HDTOOL_HOME name another folder$"
    with pytest.raises(ModelError, match=rf"^joining source.bin in {home}.* failed \(No space left.*\): {advice}"):
        joined(source, make=full)
    assert not folders(home) and not [*artifacts("joined")]
    shutil.rmtree(home)
    home.write_text("a file")
    with pytest.raises(ModelError, match=rf"^joining source.bin in {home}.* failed \(.*\): {advice}"):
        joined(source)
    assert home.read_text() == "a file"


def test_a_source_that_changes_while_it_is_read(source: Path, home: Path) -> None:
    def make(folder: Path, source: Path) -> dict[str, Any]:
        details, before = join(folder, source), source.stat()
        source.write_bytes(b"A other content")
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        return details

    with pytest.raises(ModelError, match=f"^{source} was changed while it was read: run the command again$"):
        joined(source, make=make)
    assert not folders(home)


def test_a_removal_is_refused_or_repeated(source: Path) -> None:
    made = joined(source)
    busy = f"^another process writes {made.folder}: wait for it$"
    with file_lock(lock_path(made.folder), ModelError("held")), pytest.raises(ModelError, match=busy):
        made.remove()
    (made.folder / "notes").unlink()
    (made.folder / "notes").mkdir()
    with pytest.raises(ModelError, match=rf"^{made.folder} cannot be removed \(.*\): correct the permissions$"):
        made.remove()
    (made.folder / "notes").rmdir()
    (listed,) = artifacts("joined")
    listed.remove()
    assert not made.folder.exists()


OTHER = """
import os, sys, time
from pathlib import Path
from tests.support.artifacts import join, joined

def make(folder, source):
    if sys.argv[2] == "killed in scratch":
        (folder / "content").write_text("half")
        os._exit(9)
    time.sleep(0.5)
    if sys.argv[2] == "killed while moving":
        Path.replace = lambda path, to: os._exit(9) if path.name == "notes" else os.replace(path, to)
    return join(folder, source)
print("ready", flush=True)
sys.stdin.readline()
print(joined(Path(sys.argv[1]), make=make).folder)
"""


def other(source: Path, how: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(source), how], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["killed in scratch", "killed while moving"])
def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(how: str, source: Path, home: Path) -> None:
    with other(source, how) as process:
        process.communicate("\n")
    assert process.returncode == 9 and any((folder / "content").is_file() for folder in folders(home))
    made = joined(source)
    assert content(made) == source.read_bytes() and folders(home) == [made.folder]


def test_two_processes_at_once_make_it_once(source: Path) -> None:
    processes = [other(source, "both") for _ in range(2)]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    (one, one_said), (two, two_said) = (process.communicate() for process in processes)
    assert one == two and [process.returncode for process in processes] == [0, 0], one_said + two_said
    said = (one_said + two_said).splitlines()
    assert len(said) == 2 and sum(line.endswith(": waiting for it") for line in said) == 1
