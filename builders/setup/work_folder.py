"""The folder in which a set-up keeps the results of its stages, so that the same command goes on where it stopped.

It holds copies of logged conversations, so only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from hdtool.data.errors import ResultError, worded
from hdtool.data.files.atomic_write import BINARY, NO_LINKS, OutputFile, temporary_names, to_disk
from hdtool.data.files.locking import exclusive
from hdtool.data.files.ownership import json_object, json_with
from hdtool.data.stores.home import home, setups
from hdtool.data.stores.inventory import DIGITS, StoredItem, remove_empty
from hdtool.data.stores.manifest import Checkpoint, InputShare
from hdtool.data.stores.store_files import LOCK as STORE_LOCK
from hdtool.data.stores.store_files import MANIFEST, delete_leftovers, is_regular
from hdtool.data.stores.store_replacement import recorded_name

FORMAT = 2
RESULTS, HELD_OUT, COST, HALF = "setup.json", "held-out.jsonl", "cost.json", "half"
LOCK = "lock"
KIND = "setup"
"""The kind of a set-up in the list of ``hdtool stores``."""
ADVICE = "make room, correct the permissions, or set HDTOOL_HOME to another folder"
FILES = re.compile(r"setup\.json|held-out\.jsonl|cost\.json|learned(-[0-9]+)?\.jsonl")
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


class LearnedPart(NamedTuple):
    """The conversations of one log that the stores are built from."""

    log: str
    """The log, as the user named it."""
    file: str
    """The name of the copy in the work folder."""
    conversations: int


class WorkFolder:
    """The files of one set-up: finished stages, both parts of the logs, and the cost of forward passes."""

    def __init__(self, model: str, identity: Sequence[str], logs: Sequence[str] = ()) -> None:
        """``identity`` is all that the parts of the logs depend on; a set-up with another one has another folder."""
        parts = "\n".join([str(FORMAT), *identity])
        digest = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.path = setups(model) / digest
        self.held_out, self.cost = self.path / HELD_OUT, self.path / COST
        self.half = self.path / HALF
        """A store of half of the answers, while the set-up measures what more of them would bring."""
        self._file = _results(self.path)
        self._about = {"model": recorded_name(model), "logs": [recorded_name(log) for log in logs]}
        self.stages: dict[str, dict[str, Any]] = {}
        self._conditions: dict[str, list[str]] = {}
        """What each measurement was made of and with."""

    def load(self) -> None:
        """Read the results of finished stages, if there are any."""
        with worded(ResultError, f"{self.path} cannot be read", ADVICE):
            if self._file.exists():
                kept = json_object(self._file.path)
                self.stages, self._conditions = kept["stages"], kept.get("conditions", {})

    @contextmanager
    def opened(self) -> Iterator[WorkFolder]:
        """Read the results while no other process writes them."""
        busy = ResultError(f"another setup of these logs is running in {self.path}: wait for it")
        with ExitStack() as held:
            with worded(ResultError, f"{self.path} cannot be written", ADVICE):
                _make_private(self.path)
                held.enter_context(exclusive(self.path / LOCK, busy))
            self.load()
            if not self._file.exists():  # hdtool stores finds the folder by this file
                self._write()
            yield self

    @property
    def learned(self) -> list[LearnedPart]:
        """The parts that the stores are built from, once the logs were read."""
        return [LearnedPart(*part) for part in self.stages.get("read", {}).get("learned", ())]

    @property
    def learned_files(self) -> list[Path]:
        return [self.path / part.file for part in self.learned]

    @contextmanager
    def writing_learned(self) -> Iterator[Callable[[int, bytes], None]]:
        """Yield a function that appends a line to the part of the log with a number; earlier parts are deleted."""
        written: set[Path] = set()
        current: list[tuple[Path, IO[bytes]]] = []

        def write(log: int, line: bytes) -> None:
            path = self.path / learned_name(log)
            if not current or current[0][0] != path:
                close()
                flags = os.O_WRONLY | os.O_APPEND | NO_LINKS | BINARY
                created = 0 if path in written else os.O_CREAT | os.O_EXCL
                current.append((path, os.fdopen(os.open(path, flags | created, PRIVATE_FILE), "ab")))
                written.add(path)
            current[0][1].write(line)

        def close() -> None:
            for _, stream in current:
                stream.close()
            current.clear()

        with worded(ResultError, f"{self.path} cannot be written", ADVICE):
            for path in self.path.glob("learned-*.jsonl"):
                if FILES.fullmatch(path.name) and is_regular(path):
                    path.unlink()
            try:
                yield write
            finally:
                close()
            for path in written:
                to_disk(path)

    def remove_half(self) -> None:
        """Delete the store of half of the answers."""
        _remove_half(self.half)

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record that a stage is done, with what later stages and the verdict need of it."""
        self.stages[stage] = result
        self._write()

    def forget(self, *stages: str) -> None:
        """Have stages run again."""
        if self.stages.keys() & set(stages):
            self.stages = {name: result for name, result in self.stages.items() if name not in stages}
            self._write()

    def outdated(self, conditions: Mapping[str, Sequence[str]]) -> list[str]:
        """The measurements that were made under other conditions than these."""
        return [stage for stage, now in conditions.items() if self._conditions.get(stage) != list(now)]

    def keep_measurements(self, conditions: Mapping[str, Sequence[str]]) -> None:
        """Forget the measurements that were made under other conditions; these hold for those that follow."""
        changed = self.outdated(conditions)
        self._conditions = {stage: list(now) for stage, now in conditions.items()}
        self.forget(*changed)

    def _write(self) -> None:
        row = {"format": FORMAT, **self._about, "conditions": self._conditions, "stages": self.stages}
        self._file.write(json.dumps(row, indent=1, ensure_ascii=False) + "\n")


def learned_name(log: int) -> str:
    """The file of what stores are built from, of the log with this number."""
    return f"learned-{log}.jsonl"


def _results(folder: Path) -> OutputFile:
    return OutputFile(
        folder / RESULTS, "the results of a set-up", json_with(("stages",), FORMAT), ResultError, ADVICE, private=True
    )


def _make_private(folder: Path) -> None:
    """Make a folder below that of all set-ups, and keep others out of both, which earlier versions did not."""
    places = [folder, folder.parent, folder.parent.parent]
    for place in reversed(places):
        place.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        if place.stat().st_mode & 0o077:
            place.chmod(PRIVATE_FOLDER)


def kept_setups() -> list[StoredItem]:
    """The work folders in hdtool's home, as ``hdtool stores`` lists them."""
    found = sorted(path.parent for path in home().glob(f"setups/*/*/{RESULTS}") if is_regular(path))
    return [
        _item(folder, kept)
        for folder in found
        if {"format", "stages"} <= (kept := json_object(folder / RESULTS)).keys()
    ]


def _item(folder: Path, kept: Mapping[str, Any]) -> StoredItem:
    learned: dict[str, int] = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError):  # whatever the file holds, its folder is listed
        learned = {log: number for log, _, number in kept["stages"]["read"]["learned"]}
    named = kept.get("logs")
    logs = named if isinstance(named, list) else []
    return StoredItem(
        f"{KIND}-{folder.name[:DIGITS]}",
        KIND,
        folder,
        (folder / RESULTS).stat().st_mtime,
        sum(path.stat().st_size for path in _files(folder)),
        model=Checkpoint("", str(kept.get("model", folder.parent.name))),
        sources=tuple(InputShare(str(log), "", learned.get(str(log), 0), 0) for log in logs),
    )


def remove_setup(item: StoredItem) -> None:
    """Delete the files of a set-up, and its folder if nothing else is in it."""
    folder = item.folder
    with worded(ResultError, f"{folder} cannot be removed", "correct the permissions"):
        with exclusive(folder / LOCK, ResultError(f"a setup is running in {folder}: wait for it")):
            _remove_half(folder / HALF)
            # Last comes the file by which the folder is found, so that a killed removal can be repeated.
            for path in sorted(_files(folder), key=lambda path: path.name == RESULTS):
                path.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        remove_empty(folder)


def _files(folder: Path) -> list[Path]:
    """The files of a set-up, those that a killed one left unfinished included."""
    stale = temporary_names(FILES.pattern)
    return [
        path
        for path in folder.iterdir()
        if (FILES.fullmatch(path.name) or stale.fullmatch(path.name)) and is_regular(path)
    ]


def _remove_half(folder: Path) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    for name in (MANIFEST, STORE_LOCK):
        if is_regular(folder / name):
            (folder / name).unlink()
    delete_leftovers(folder, ())
    with suppress(OSError):
        folder.rmdir()
