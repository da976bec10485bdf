"""Artifacts: folders in hdtool's home that are made once from source files. A manifest lists an artifact's files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hdtool.data.durable_files import file_lock, json_digest, lock_path
from hdtool.data.errors import ModelError, os_errors_as
from hdtool.data.file_state import FileState
from hdtool.data.home import artifact_at_home, artifacts_at_home
from hdtool.data.notes import note
from hdtool.data.output_files import OutputFile, sync_to_disk
from hdtool.data.own_files import json_object

MANIFEST = "artifact.json"
Make = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Artifact:
    folder: Path
    kind: str
    """Kind of the artifact. The part before a hyphen names the folder in hdtool's home that holds such artifacts."""
    versions: dict[str, Any]
    identity: str
    """Fingerprint, sizes and modification times of the sources."""
    sources: tuple[FileState, ...]
    details: dict[str, Any]
    files: dict[str, list[int]]
    """Size in bytes and modification time in nanoseconds of each file."""

    @classmethod
    def read(cls, folder: Path) -> Artifact | None:
        """Return the artifact in a folder, or None if the folder's manifest is missing or damaged."""
        with suppress(OSError, KeyError, TypeError):
            row = json_object(folder / MANIFEST)
            return cls(folder, sources=tuple(FileState(**state) for state in row.pop("sources")), **row)
        return None

    @property
    def manifest(self) -> OutputFile:
        path, content = self.folder / MANIFEST, "a manifest of hdtool"
        return OutputFile(path, content, lambda _: Artifact.read(self.folder) is not None, ModelError, "move it away")

    def write(self) -> None:
        row = {name: value for name, value in asdict(self).items() if name != "folder"}
        self.manifest.write(json.dumps(row, indent=1))

    def remove(self) -> None:
        """Delete the artifact's files, the manifest last, and then the folder if nothing else is in it.

        Raise ModelError if another process holds the folder's lock, or if a file cannot be deleted.
        """
        busy = ModelError(f"another process writes {self.folder}: wait for it")
        with (
            os_errors_as(ModelError, f"{self.folder} cannot be removed", "correct the permissions"),
            file_lock(lock_path(self.folder), busy, remove=True),
        ):
            present = set(os.listdir(self.folder))  # other names may lead out of the folder
            for name in (*self.files, MANIFEST):
                if name in present:
                    (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint in the sources. The same fingerprint identifies that checkpoint's stores."""
        return str(self.details["fingerprint"])

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def kept(self) -> Artifact | None:
        """Return the folder's artifact if it is unchanged and has this kind, identity and these versions; else None."""
        kept, alike = Artifact.read(self.folder), (self.kind, self.versions, self.identity)
        with suppress(OSError, ValueError):
            if kept and (kept.kind, kept.versions, kept.identity) == alike:
                files = {name: FileState.of(self.folder / name).size_and_time for name in kept.files}
                return kept if kept.files == files else None
        return None


def artifacts(kind: str) -> Iterator[Artifact]:
    """Yield all artifacts in hdtool's home whose kind has the same part before a hyphen as ``kind``."""
    yield from filter(None, map(Artifact.read, sorted(artifacts_at_home(kind).glob("[!.]*"))))


def made_once(
    kind: str,
    name: str,
    versions: dict[str, Any],
    sources: Sequence[Path],
    fingerprint: str,
    activity: str,
    make: Make,
    check: Callable[[], object] = bool,
) -> Artifact:
    """Return the artifact made from ``sources``; make it if it is missing or damaged, or if content or versions differ.

    ``name`` begins the folder's name. ``fingerprint`` identifies the sources' content and may be computed from samples.
    ``activity`` names the work in messages, as in "reading model.gguf into". ``make`` writes the files to a folder and
    returns the artifact's details, including the checkpoint's ``fingerprint``. Before anything is written, ``check``
    raises an error if the sources can't be used. A new artifact replaces those of its kind made from the last source.
    """
    states = tuple(map(FileState.of, sources))
    identity = " ".join([fingerprint, *(str(state.size_and_time) for state in states)])
    digest = json_digest([kind, versions, identity])[:16]
    own = artifact_at_home(kind, name, digest)
    folder = next(own.parent.glob(f"[!.]*{digest}"), own)  # the source may have had another name
    wanted = Artifact(folder, kind, versions, identity, states, {}, {})
    if not (kept := wanted.kept()):
        check()
        kept = _made(wanted, activity, make)
        for other in artifacts(kind):
            paths = [state.path for state in other.sources]
            if other.kind == kind and other.folder != folder and states[-1].path in paths:
                with suppress(ModelError):
                    other.remove()
    elif not all(state.holds for state in kept.sources):
        with suppress(ModelError):
            replace(kept, sources=states).write()
    return kept


def _made(wanted: Artifact, activity: str, make: Make) -> Artifact:
    folder, advice = wanted.folder, "make room, or let HDTOOL_HOME name another folder"
    busy = ModelError(f"another process is {activity} {folder}")
    with ExitStack() as held:
        held.enter_context(os_errors_as(ModelError, f"{activity} {folder} failed", advice))
        folder.parent.mkdir(parents=True, exist_ok=True)
        held.enter_context(file_lock(lock_path(folder), busy, waits=True))
        for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # by killed processes
            shutil.rmtree(left, ignore_errors=True)
        if kept := wanted.kept():  # another process has made it meanwhile
            return kept
        wanted.manifest.exists()  # raises if hdtool did not write it
        note(f"{activity} {folder}, {'again, as it was damaged' if folder.is_dir() else 'once'}")
        scratch = TemporaryDirectory(".tmp", f".{folder.name}.", folder.parent, ignore_cleanup_errors=True)
        place = Path(held.enter_context(scratch))
        details, written = make(place), sorted(place.iterdir())
        for file in written:
            file.chmod(folder.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            sync_to_disk(file)
        if changed := next((state.path for state in wanted.sources if not state.holds), None):
            raise ModelError(f"{changed} was changed while it was read: run the command again")
        files = {file.name: FileState.of(file).size_and_time for file in written}
        made = replace(wanted, details=details, files=files)
        made.write()  # first: an artifact without one of its files isn't whole, but can be removed
        for file in written:
            file.replace(folder / file.name)
    return made
