"""Artifacts: folders in hdtool's home that are made once from source files, each with a manifest.

A manifest states from which content and by which versions an artifact was made, its files, and the states of its
sources. Sources in such a state aren't read; copies and moved files are recognized by their content. New files are
written to a scratch folder and then moved, so that an artifact is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hdtool.data.durable_files import file_lock, folder_lock, lock_path, remove_scratch_folders, scratch_folder
from hdtool.data.errors import ModelError, os_errors_as
from hdtool.data.file_state import FileState, States, StoredFile, content_hash
from hdtool.data.manifests import FORMAT, MANIFEST, PARSERS
from hdtool.data.output_files import OutputFile, json_object, sync_to_disk
from hdtool.data.stores.home import artifact_at_home, artifacts_at_home, home

START = b'{\n "artifact": '
"""First bytes of each manifest."""
MAX_SEEN = 16
"""Maximum number of groups of states that a manifest keeps: one for each copy of the sources."""


@dataclass(frozen=True)
class Artifact:
    folder: Path
    kind: str
    """Name of the folder in hdtool's home; what follows a hyphen distinguishes artifacts made in several ways."""
    identity: str
    """Identity of the sources' content."""
    versions: dict[str, Any]
    """Versions of what made the artifact, by name."""
    details: dict[str, Any]
    """What the maker stores with the artifact."""
    files: dict[str, StoredFile]
    seen: tuple[States, ...] = ()
    """States of sources known to have the content."""
    manifest: str = MANIFEST

    @classmethod
    def read(cls, folder: Path) -> Artifact | None:
        """Return the artifact in a folder.

        Return None if its manifest is missing, damaged or in another format, or if it lists a file outside the folder.
        """
        for manifest, parse in PARSERS.items():
            with suppress(OSError, KeyError, TypeError, ValueError, AttributeError):
                fields = parse(json_object(folder / manifest))
                if all(_is_file_name(name) for name in fields["files"]):
                    return cls(folder, manifest=manifest, **fields)
        return None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint in the sources, which identifies the checkpoint's stores."""
        return str(self.details.get("fingerprint", self.identity))

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def is_whole(self) -> bool:
        """True if all files exist with their recorded content."""
        try:
            return all(file.is_at(self.folder / name) for name, file in self.files.items())
        except OSError:
            return False

    def is_of(self, identity: str, states: States) -> bool:
        """Return True if the artifact was made from the sources' content.

        An identity may be that of samples, so it doesn't suffice if a source was written again since it was seen.
        """
        times = {state.path: state.mtime_ns for sources in self.seen for state in sources}
        return identity == self.identity and all(times.get(one.path, one.mtime_ns) == one.mtime_ns for one in states)

    def is_superseded_by(self, states: States) -> bool:
        """Return True if the artifact was made from files at these paths and is of no use to files at other paths.

        Return True, too, if it was made from files in hdtool's home that are gone.
        """
        others = [sources for sources in self.seen if _paths(sources) != _paths(states)]
        is_held = any(all(state.holds for state in sources) for sources in others)
        was_at_home = any(home().resolve() in Path(path).parents for sources in others for path in _paths(sources))
        return states in self.seen or ((len(others) < len(self.seen) or was_at_home) and not is_held)

    def remember(self, states: States) -> None:
        """Add the sources' states and the files' current ``stat`` fields to the manifest; ignore failures.

        The artifact must be whole.
        """
        with suppress(OSError, ModelError):
            if self._with(states) != self:
                with file_lock(lock_path(self.folder), ModelError(f"another process writes {self.folder}")):
                    if current := Artifact.read(self.folder):
                        current._with(states).write()

    def _with(self, states: States) -> Artifact:
        others = [sources for sources in self.seen if _paths(sources) != _paths(states)]
        files = {name: StoredFile.of(self.folder / name, file.sha256) for name, file in self.files.items()}
        return replace(self, files=files, seen=self.seen if states in self.seen else (*others, states)[-MAX_SEEN:])

    def write(self) -> None:
        """Write the manifest. The files that it names must already be in place."""
        row = asdict(self)
        folder, kind, _ = (row.pop(name) for name in ("folder", "kind", "manifest"))
        text = json.dumps({"artifact": kind, "format": FORMAT, **row}, indent=1) + "\n"
        _manifest_in(folder).write(text)

    def remove(self) -> None:
        """Delete the artifact's files, its manifest last, and its folder if that is then empty.

        Raise a ``ModelError`` if another process writes the artifact, or if a file cannot be deleted.
        """
        busy, errors = ModelError(f"another process writes {self.folder}: wait for it"), list[OSError]()
        with (
            os_errors_as(ModelError, f"{self.folder} cannot be removed", "correct the permissions"),
            file_lock(lock_path(self.folder), busy, remove=True),
        ):
            for name in self.files:
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            (self.folder / self.manifest).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()


def artifacts(kind: str) -> Iterator[Artifact]:
    """Yield the artifacts of a kind in hdtool's home, and of all kinds whose names only add a hyphen and a word."""
    for folder in sorted(artifacts_at_home(kind).glob("[!.]*")):
        if (artifact := Artifact.read(folder)) and artifact.kind.partition("-")[0] == kind.partition("-")[0]:
            yield artifact


@dataclass(frozen=True)
class Recipe:
    """How an artifact is made from source files."""

    kind: str
    name: str
    """Name for human readers; it begins the folder's name."""
    sources: Sequence[Path]
    versions: dict[str, Any]
    activity: str
    """Says what making it means, such as "reading model.gguf into"; the folder follows."""
    identify: Callable[[], str]
    """Returns the identity of the sources' content."""
    make: Callable[[Path, str], dict[str, Any]]
    """Writes the files to a folder, given the identity; returns the details."""

    def find(self, matches: Callable[[Artifact], bool]) -> Artifact | None:
        """Return a whole artifact of this kind and these versions that matches."""
        made_alike = (kept for kept in artifacts(self.kind) if (kept.kind, kept.versions) == (self.kind, self.versions))
        return next((kept for kept in made_alike if matches(kept) and kept.is_whole), None)

    def artifact(self) -> Artifact:
        """Return the artifact of the sources; make it if it is missing, damaged or made from other content."""
        states = tuple(map(FileState.of, self.sources))
        settled = all(state.is_settled for state in states)
        if not (found := self.find(lambda kept: states in kept.seen)):
            identity = self.identify()
            found = self.find(lambda kept: kept.is_of(identity, states)) or self._made(identity, states, settled)
            self._remove_superseded(found.folder, states)
        if settled:
            found.remember(states)
        return found

    def _made(self, identity: str, states: States, settled: bool) -> Artifact:
        words = json.dumps([self.kind, self.versions, identity], sort_keys=True)
        folder = artifact_at_home(self.kind, self.name, hashlib.sha256(words.encode()).hexdigest())
        busy, advice = (
            f"another process is {self.activity} {folder}",
            "make room, or let HDTOOL_HOME name another folder",
        )
        with (
            os_errors_as(ModelError, f"{self.activity} {folder} failed", advice),
            folder_lock(folder, ModelError(busy)),
        ):
            remove_scratch_folders(folder)
            # Another process may have made it meanwhile.
            if made := self.find(lambda kept: kept.folder == folder and kept.is_of(identity, states)):
                return made
            _manifest_in(folder).exists()  # raises if hdtool did not write it
            again = "again, as it was damaged or its source was changed" if folder.is_dir() else "once"
            print(f"note: {self.activity} {folder}, {again}", file=sys.stderr)
            return self._written(folder, identity, states, (states,) if settled else ())

    def _remove_superseded(self, folder: Path, states: States) -> None:
        for other in artifacts(self.kind):
            if other.kind == self.kind and other.folder != folder and other.is_superseded_by(states):
                with suppress(ModelError):
                    other.remove()

    def _written(self, folder: Path, identity: str, states: States, seen: tuple[States, ...]) -> Artifact:
        with scratch_folder(folder) as place:
            details, written = self.make(place, identity), sorted(place.iterdir())
            for file in written:
                file.chmod(place.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
                sync_to_disk(file)
            files = {file.name: StoredFile.of(file, content_hash(file)) for file in written}
            for state in states:
                if not state.holds:
                    raise ModelError(f"{state.path} was changed while it was read: run the command again")
            made = Artifact(folder, self.kind, identity, self.versions, details, files, seen)
            if folder.is_dir():  # one of its files was removed or changed
                _manifest_in(folder).remove()
                for file in written:
                    file.replace(folder / file.name)
                made = replace(made, files={name: StoredFile.of(folder / name, files[name].sha256) for name in files})
                made.write()
            else:
                replace(made, folder=place).write()
                place.replace(folder)
        return made


def _manifest_in(folder: Path) -> OutputFile:
    def is_ours(path: Path) -> bool:
        with path.open("rb") as stream:
            return stream.read(len(START)) == START

    return OutputFile(folder / MANIFEST, "a manifest of hdtool", is_ours, ModelError, "move it away")


def _paths(states: States) -> list[str]:
    return [state.path for state in states]


def _is_file_name(name: str) -> bool:
    """Return True if a name from a manifest is that of a file in the manifest's folder."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name
