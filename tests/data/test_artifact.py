"""Artifacts are made once from their sources, are whole or absent, and hold only what hdtool wrote."""

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

from hdtool.data import file_state
from hdtool.data.artifact import MAX_SEEN, Artifact, artifacts
from hdtool.data.durable_files import file_lock, lock_path
from hdtool.data.errors import ModelError
from hdtool.data.manifests import MANIFEST
from tests.support.artifacts import NOTES, joined
from tests.support.project import ROOT

NOTE = "note.txt"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_state, "MIN_SETTLED_AGE", -60.0)
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.bin"
    file.write_bytes(b"A first content")
    return file


def content(artifact: Artifact) -> bytes:
    return (artifact.folder / "content").read_bytes()


def folders(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("*/*") if path.is_dir())


def rewritten(file: Path, text: bytes, *, same_time: bool = False) -> None:
    before = file.stat()
    file.write_bytes(text)
    time = before.st_mtime_ns + (0 if same_time else 1)
    os.utime(file, ns=(before.st_atime_ns, time))


def test_unchanged_sources_are_not_read_again(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = joined(source).artifact()
    assert content(made) == source.read_bytes() and made.fingerprint == "A first " and made.is_whole
    assert capfd.readouterr().err == f"note: joining source.bin in {made.folder}, once\n"
    assert joined(source, identify=lambda: pytest.fail("it was read")).artifact() == made
    assert [*artifacts("joined")] == [made] and made.bytes == len(content(made)) + len(NOTES)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("way", [shutil.copy, shutil.move, shutil.copy2])
def test_a_copy_and_a_moved_source_are_recognized(way: Callable[[Path, Path], object], source: Path) -> None:
    made, other = joined(source).artifact(), source.with_name("other.bin")
    way(source, other)
    unmade = {"make": lambda *_: pytest.fail("it was made again")}
    assert joined(other, **unmade).artifact().folder == made.folder
    assert joined(other, **unmade, identify=lambda: pytest.fail("it was read again")).artifact().folder == made.folder


@pytest.mark.parametrize(
    ("text", "same_time"),
    [(b"B first content", True), (b"A longer first content", True), (b"A first CONTENT", False)],
    ids=["identity and time", "size", "what no sample shows"],
)
def test_a_changed_source_gives_another_artifact(
    text: bytes, same_time: bool, source: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    joined(source).artifact()
    rewritten(source, text, same_time=same_time)
    again = joined(source).artifact()
    assert content(again) == text
    assert folders(home) == [again.folder], "what nothing has any more takes no room"
    assert joined(source, identify=lambda: pytest.fail("it was read")).artifact() == Artifact.read(again.folder)


def test_what_another_source_has_and_what_hdtool_did_not_write_stays(source: Path, home: Path) -> None:
    copy = Path(shutil.copy(source, source.with_name("copy.bin")))
    first, other_kind = joined(source).artifact(), joined(source, kind="joined-twice").artifact()
    joined(copy).artifact()
    (first.folder / NOTE).write_text("mine")
    rewritten(source, b"C")
    second = joined(source).artifact()
    assert sorted((first.folder, second.folder, other_kind.folder)) == folders(home)
    rewritten(copy, b"D")
    third = joined(copy).artifact()
    assert sorted((first.folder, second.folder, third.folder, other_kind.folder)) == folders(home)
    assert [path.name for path in first.folder.iterdir()] == [NOTE]


def test_other_versions_make_it_again(source: Path, home: Path) -> None:
    old = joined(source).artifact()
    new = joined(source, versions={"joiner": 2}).artifact()
    assert new.folder != old.folder and folders(home) == [new.folder]


def test_only_settled_sources_are_remembered_and_not_without_end(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(file_state, "MIN_SETTLED_AGE", 3600.0)
        assert not joined(source).artifact().seen
    for number in range(MAX_SEEN + 2):
        joined(Path(shutil.copy(source, source.with_name(f"{number}.bin")))).artifact()
    (kept,) = artifacts("joined")
    assert [Path(state.path).name for (state,) in kept.seen] == [f"{number}.bin" for number in range(2, MAX_SEEN + 2)]


def manifest_with(artifact: Artifact, **changed: Any) -> None:
    file = artifact.folder / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}, indent=1))


def flipped(artifact: Artifact) -> None:
    rewritten(artifact.folder / "content", b"A first cOntent")


DAMAGES: dict[str, Callable[[Artifact], object]] = {
    "a bit": flipped,
    "cut short": lambda artifact: os.truncate(artifact.folder / "content", 5),
    "a file is gone": lambda artifact: (artifact.folder / "notes").unlink(),
    "no manifest": lambda artifact: (artifact.folder / MANIFEST).unlink(),
    "an empty manifest": lambda artifact: os.truncate(artifact.folder / MANIFEST, 0),
    "half a manifest": lambda artifact: os.truncate(artifact.folder / MANIFEST, 200),
    "a later format": lambda artifact: manifest_with(artifact, format=99),
    "no numbers": lambda artifact: manifest_with(artifact, files={"content": ["0", "x"]}),
    "no states": lambda artifact: manifest_with(artifact, seen=[[3]]),
}
DAMAGES |= {
    f"lists {name!r}": partial(manifest_with, files={name: ["0" * 64, 4]})
    for name in ("../thesis.txt", "/tmp/thesis.txt", "..", ".", "", "a\0b")
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_damaged_is_made_again(
    damage: Callable[[Artifact], object], source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = joined(source).artifact()
    (made.folder / NOTE).write_text("mine")
    thesis = made.folder.parent / "thesis.txt"
    thesis.write_text("mine")
    damage(made)
    capfd.readouterr()
    again = joined(source).artifact()
    assert again.is_whole and content(again) == source.read_bytes() and again.folder == made.folder
    assert capfd.readouterr().err.endswith(", again, as it was damaged or its source was changed\n")
    assert joined(source).artifact() == again and not capfd.readouterr().err
    again.remove()
    assert [path.name for path in made.folder.iterdir()] == [NOTE] and thesis.read_text() == "mine"


def test_a_foreign_manifest_stays(source: Path) -> None:
    made = joined(source).artifact()
    foreign = made.folder / MANIFEST
    foreign.write_text('{"artifact": "of a museum"}')
    with pytest.raises(ModelError, match=f"^{foreign} is there and is not a manifest of hdtool: move it away$"):
        joined(source, make=lambda *_: pytest.fail("it was made in vain")).artifact()
    assert foreign.read_text() == '{"artifact": "of a museum"}' and content(made)


def test_a_moved_home_is_whole(source: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined(source).artifact()
    shutil.copytree(home, home.with_name("copy"))
    shutil.rmtree(home)
    home.with_name("copy").rename(home)
    joined(source, make=lambda *_: pytest.fail("it was made again")).artifact()
    monkeypatch.setattr(file_state, "content_hash", lambda _: pytest.fail("its files were hashed again"))
    assert joined(source).artifact().is_whole


def full(folder: Path, _: str) -> dict[str, Any]:
    (folder / "content").write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_and_a_home_that_cannot_be_written(source: Path, home: Path) -> None:
    advice = "make room, or let HDTOOL_HOME name another folder$"
    with pytest.raises(ModelError, match=rf"^joining source.bin in {home}.* failed \(No space left.*\): {advice}"):
        joined(source, make=full).artifact()
    assert not folders(home) and not [*artifacts("joined")]
    shutil.rmtree(home)
    home.write_text("a file")
    with pytest.raises(ModelError, match=rf"^joining source.bin in {home}.* failed \(.*\): {advice}"):
        joined(source).artifact()
    assert home.read_text() == "a file"


def test_without_a_lock_it_is_used_and_not_remembered(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copy = joined(source).artifact(), Path(shutil.copy(source, source.with_name("copy.bin")))
    with monkeypatch.context() as patched:
        patched.setattr("hdtool.data.artifact.file_lock", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
        assert joined(copy).artifact() == made
    assert [*artifacts("joined")] == [made]


def test_a_source_that_changes_while_it_is_read(source: Path, home: Path) -> None:
    def make(folder: Path, identity: str) -> dict[str, Any]:
        details = joined(source).make(folder, identity)
        rewritten(source, b"B first content", same_time=True)
        return details

    with pytest.raises(ModelError, match=f"^{source} was changed while it was read: run the command again$"):
        joined(source, make=make).artifact()
    assert not folders(home)


def test_a_removal_is_refused_or_repeated(source: Path) -> None:
    made = joined(source).artifact()
    busy = f"^another process writes {made.folder}: wait for it$"
    with file_lock(lock_path(made.folder), ModelError("held")), pytest.raises(ModelError, match=busy):
        made.remove()
    assert made.is_whole
    (made.folder / "content").unlink()
    (made.folder / "content").mkdir()
    with pytest.raises(ModelError, match=rf"^{made.folder} cannot be removed \(.*\): correct the permissions$"):
        made.remove()
    assert sorted(path.name for path in made.folder.iterdir()) == [MANIFEST, "content"], "the others are removed"
    (made.folder / "content").rmdir()
    (listed,) = artifacts("joined")
    listed.remove()
    assert not made.folder.exists()


OTHER = """
import os, sys, time
from pathlib import Path
from hdtool.data import file_state
from tests.support.artifacts import joined

file_state.MIN_SETTLED_AGE = -60.0
source = Path(sys.argv[1])
def make(folder, identity):
    details = joined(source).make(folder, identity)
    if sys.argv[2] == "killed":
        os._exit(9)
    time.sleep(0.5)
    return details
print("ready", flush=True)
sys.stdin.readline()
print(joined(source, make=make).artifact().folder)
"""


def other(source: Path, how: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(source), how], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(source: Path, home: Path) -> None:
    with other(source, "killed") as process:
        process.communicate("\n")
    assert process.returncode == 9
    (left,) = folders(home)
    assert left.name.endswith(".tmp") and (left / "content").is_file() and not [*artifacts("joined")]
    assert content(joined(source).artifact()) == source.read_bytes() and not left.exists()


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


def old(home: Path, kind: str, manifest: str, **row: Any) -> Path:
    folder = home / kind / "old"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", NOTE):
        (folder / name).write_text(name)
    (folder / manifest).write_text(json.dumps({"transformers": "5.20", "sha256": "0123456789abcdef" * 4, **row}))
    return folder


@pytest.mark.parametrize("kind", ["gguf", "quantized"])
def test_folders_of_earlier_versions_are_listed_and_removed(kind: str, source: Path, home: Path) -> None:
    state = vars(file_state.FileState.of(source))
    if kind == "gguf":
        folder = old(home, kind, "gguf.json", files={"config.json": 11}, seen=[state])
    else:
        row = {"scheme": "q8_0", "fingerprint": "fedcba9876543210", "seen": [[state]]}
        files = {name: ["0" * 64, len(name), 1, 1, 1] for name in ("config.json", "model.safetensors")}
        folder = old(home, kind, "quantized.json", files=files, **row)
    (kept,) = artifacts(kind)
    assert kept.folder == folder and kept.fingerprint == {"gguf": "0123456789abcdef"}.get(kind, "fedcba9876543210")
    new = joined(source, kind=kept.kind).artifact()
    assert [*artifacts(kind)] == [new], "it was superseded"
    assert [path.name for path in folder.iterdir()] == [NOTE]
