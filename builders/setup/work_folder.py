"""Work folder from which an interrupted set-up resumes.

It holds copies of logged conversations, so only its owner can read it.
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

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import ResultError, os_errors_as
from hdtool.data.home import home, setups_at_home
from hdtool.data.output_files import O_BINARY, O_NOFOLLOW, OutputFile, sync_to_disk, temporary_names
from hdtool.data.own_files import is_json_with, json_object
from hdtool.data.stores.manifest import Checkpoint, InputShare
from hdtool.data.stores.store_file_names import (
    LOCK_FILE as STORE_LOCK,
    MANIFEST,
    delete_leftovers,
    is_regular,
)
from hdtool.data.stores.store_folder import recorded_name
from hdtool.data.stores.stores_at_home import SHOWN_FINGERPRINT_DIGITS, StoredItem, remove_empty
from hdtool.runtime.settings.measuring import COST_FILE

SETUP_FORMAT = 2
RESULTS_FILE, HELD_OUT_FILE, HALF_STORE = "setup.json", "held-out.jsonl", "half"
SETUP_LOCK = "lock"
SETUP_KIND = "setup"
"""Kind under which ``hdtool stores`` lists set-ups."""
WRITE_ADVICE = "make room, correct the permissions, or set HDTOOL_HOME to another folder"
SETUP_FILES = re.compile(r"setup\.json|held-out\.jsonl|cost\.json|learned(-[0-9]+)?\.jsonl")
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


class LearnedPart(NamedTuple):
    """Part of one log from which the stores are built."""

    log: str
    """Name of the log, as the user typed it."""
    file: str
    """Name of the copy in the work folder."""
    conversations: int


class WorkFolder:
    """Files of one set-up: stage results, the learned and held-out parts of the logs, and the cost curve."""

    def __init__(self, model: str, identity: Sequence[str], logs: Sequence[str] = ()) -> None:
        """``identity`` lists what determines which conversations are held out; it selects the folder."""
        parts = "\n".join([str(SETUP_FORMAT), *identity])
        digest = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.path = setups_at_home(model) / digest
        self.held_out, self.cost = self.path / HELD_OUT_FILE, self.path / COST_FILE
        self.half = self.path / HALF_STORE
        """Folder of a temporary store with half of the answers, for the learning curve."""
        self._file = _results_file(self.path)
        self._about = {"model": recorded_name(model), "logs": [recorded_name(log) for log in logs]}
        self.stages: dict[str, dict[str, Any]] = {}
        self._conditions: dict[str, list[str]] = {}
        """Conditions under which each measurement was made."""

    def load(self) -> None:
        """Read the results of finished stages, if any."""
        with os_errors_as(ResultError, f"{self.path} cannot be read", WRITE_ADVICE):
            if self._file.exists():
                record = json_object(self._file.path)
                self.stages, self._conditions = record["stages"], record.get("conditions", {})

    @contextmanager
    def opened(self) -> Iterator[WorkFolder]:
        """Create the folder if needed, lock it or raise a ``ResultError``, and read its results."""
        busy = ResultError(f"another setup of these logs is running in {self.path}: wait for it")
        with ExitStack() as held:
            with os_errors_as(ResultError, f"{self.path} cannot be written", WRITE_ADVICE):
                _make_private(self.path)
                held.enter_context(file_lock(self.path / SETUP_LOCK, busy))
            self.load()
            if not self._file.exists():  # ``hdtool stores`` finds the folder by this file
                self._write()
            yield self

    @property
    def learned(self) -> list[LearnedPart]:
        """Parts of the logs from which the stores are built; empty until the logs are read."""
        return [LearnedPart(*part) for part in self.stages.get("read", {}).get("learned", ())]

    @property
    def learned_files(self) -> list[Path]:
        return [self.path / part.file for part in self.learned]

    @contextmanager
    def writing_learned(self) -> Iterator[Callable[[int, bytes], None]]:
        """Delete earlier learned parts, and yield a function that appends a line to the learned part of a log."""
        written: set[Path] = set()
        current: list[tuple[Path, IO[bytes]]] = []

        def write(log: int, line: bytes) -> None:
            path = self.path / learned_name(log)
            if not current or current[0][0] != path:
                close()
                flags = os.O_WRONLY | os.O_APPEND | O_NOFOLLOW | O_BINARY
                created = 0 if path in written else os.O_CREAT | os.O_EXCL
                current.append((path, os.fdopen(os.open(path, flags | created, PRIVATE_FILE), "ab")))
                written.add(path)
            current[0][1].write(line)

        def close() -> None:
            for _, stream in current:
                stream.close()
            current.clear()

        with os_errors_as(ResultError, f"{self.path} cannot be written", WRITE_ADVICE):
            for path in self.path.glob("learned-*.jsonl"):
                if SETUP_FILES.fullmatch(path.name) and is_regular(path):
                    path.unlink()
            try:
                yield write
            finally:
                close()
            for path in written:
                sync_to_disk(path)

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record that a stage is done, with the results that later stages and the verdict need."""
        self.stages[stage] = result
        self._write()

    def forget(self, *stages: str) -> None:
        """Discard the results of stages, so that they run again."""
        if self.stages.keys() & set(stages):
            self.stages = {name: result for name, result in self.stages.items() if name not in stages}
            self._write()

    def outdated(self, conditions: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the stages whose measurements were not made under ``conditions``."""
        return [stage for stage, now in conditions.items() if self._conditions.get(stage) != list(now)]

    def keep_measurements(self, conditions: Mapping[str, Sequence[str]]) -> None:
        """Discard measurements not made under ``conditions``, and record ``conditions`` for the next measurements."""
        changed = self.outdated(conditions)
        self._conditions = {stage: list(now) for stage, now in conditions.items()}
        self.forget(*changed)

    def _write(self) -> None:
        row = {"format": SETUP_FORMAT, **self._about, "conditions": self._conditions, "stages": self.stages}
        self._file.write(json.dumps(row, indent=1, ensure_ascii=False) + "\n")


def learned_name(log: int) -> str:
    """Return the name of the file with the learned part of log number ``log``."""
    return f"learned-{log}.jsonl"


def _results_file(folder: Path) -> OutputFile:
    return OutputFile(
        folder / RESULTS_FILE,
        "the results of a set-up",
        is_json_with(("stages",), SETUP_FORMAT),
        ResultError,
        WRITE_ADVICE,
        private=True,
    )


def _make_private(folder: Path) -> None:
    """Create the folder and the two above it, or restrict existing ones, so that only the owner has access."""
    places = [folder, folder.parent, folder.parent.parent]
    for place in reversed(places):
        place.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        if place.stat().st_mode & 0o077:
            place.chmod(PRIVATE_FOLDER)


def stored_setups() -> list[StoredItem]:
    """Return the work folders in hdtool's home as items of the ``hdtool stores`` listing."""
    folders = sorted(path.parent for path in home().glob(f"setups/*/*/{RESULTS_FILE}") if is_regular(path))
    return [
        _item(folder, record)
        for folder in folders
        if {"format", "stages"} <= (record := json_object(folder / RESULTS_FILE)).keys()
    ]


def _item(folder: Path, record: Mapping[str, Any]) -> StoredItem:
    learned: dict[str, int] = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError):  # list the folder even if its file is malformed
        learned = {log: number for log, _, number in record["stages"]["read"]["learned"]}
    named = record.get("logs")
    logs = named if isinstance(named, list) else []
    return StoredItem(
        f"{SETUP_KIND}-{folder.name[:SHOWN_FINGERPRINT_DIGITS]}",
        SETUP_KIND,
        folder,
        (folder / RESULTS_FILE).stat().st_mtime,
        sum(path.stat().st_size for path in _files(folder)),
        model=Checkpoint("", str(record.get("model", folder.parent.name))),
        sources=tuple(InputShare(str(log), "", learned.get(str(log), 0), 0) for log in logs),
    )


def remove_setup(item: StoredItem) -> None:
    """Delete the files of a set-up, and its folder if nothing else is in it."""
    folder = item.folder
    with os_errors_as(ResultError, f"{folder} cannot be removed", "correct the permissions"):
        busy = ResultError(f"a setup is running in {folder}: wait for it")
        with file_lock(folder / SETUP_LOCK, busy, remove=True):
            remove_half(folder / HALF_STORE)
            # Delete the results file last, so that a killed removal can be found and repeated.
            for path in sorted(_files(folder), key=lambda path: path.name == RESULTS_FILE):
                path.unlink(missing_ok=True)
        remove_empty(folder)


def _files(folder: Path) -> list[Path]:
    """Return the files of a set-up, including temporary ones left by a killed process."""
    stale = temporary_names(SETUP_FILES.pattern)
    return [
        path
        for path in folder.iterdir()
        if (SETUP_FILES.fullmatch(path.name) or stale.fullmatch(path.name)) and is_regular(path)
    ]


def remove_half(folder: Path) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    for name in (MANIFEST, STORE_LOCK):
        if is_regular(folder / name):
            (folder / name).unlink()
    delete_leftovers(folder, ())
    with suppress(OSError):
        folder.rmdir()
