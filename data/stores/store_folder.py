"""Read and build a store: a folder of flat files that a manifest lists with sizes and checksums.

The manifest is replaced atomically once all files are written. Until then the old store stays complete, and readers
can still use the files that they have opened. A build deletes the files of killed builds, but never other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError, os_errors_as, write_fault
from hdtool.data.output_files import sync_to_disk
from hdtool.data.stores.kinds import BUILT_KINDS, HISTORY_KIND
from hdtool.data.stores.manifest import Manifest, StoredFile, TokenizerFingerprint
from hdtool.data.stores.store_file_names import (
    BUILT_FILES,
    LOCK_FILE,
    MANIFEST,
    check_destination,
    create_empty,
    holds_manifest,
    manifest_bytes,
    part_name,
    printable,
    sweep,
    write_manifest,
)

MAX_OPEN_ATTEMPTS = 10
"""Maximum number of attempts to open a store that other processes keep replacing."""

T = TypeVar("T")


def read_manifest(folder: Path, *, check: bool = True) -> Manifest:
    """Read a built store's manifest; raise StoreError if it is unreadable or, with ``check``, if a file is damaged."""
    return read_store(folder, lambda manifest: manifest, check=check)


def read_store(folder: Path, read: Callable[[Manifest], T], *, check: bool = True) -> T:
    """Call ``read`` with a store's manifest and return the result, retrying if the store is replaced meanwhile.

    ``read`` opens files, and raises StoreError if it cannot. With ``check``, the sizes of all files are checked first.
    """
    for _ in range(MAX_OPEN_ATTEMPTS):
        text = manifest_bytes(folder)
        try:
            return read(parse_manifest(folder, text, check=check))
        except StoreError:
            if manifest_bytes(folder) == text:
                raise
    raise StoreError(f"{folder} was replaced {MAX_OPEN_ATTEMPTS} times while it was opened: wait for the builds to end")


def parse_manifest(folder: Path, text: bytes, *, check: bool) -> Manifest:
    """Parse the manifest of a built store; raise StoreError if it is damaged, of another format or of a history.

    With ``check``, also raise one if a file is missing or doesn't have its recorded size.
    """
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{folder / MANIFEST} cannot be read ({error}): build the store again") from None
    format, name = (row.get("format"), str(row.get("kind"))) if isinstance(row, dict) else (None, "")
    if name == HISTORY_KIND:
        raise StoreError(
            f"{folder} is a history store, a model store or a corpus index is needed: name another folder, "
            "or make a model store of it with hdtool build-model-db --from"
        )
    kind = BUILT_KINDS.get(name)
    if kind and (type(format) is not int or format != kind.format):
        raise StoreError(
            f"{folder} is a store of format {ascii(format)[:20]}, this hdtool reads format {kind.format}: "
            f"build it again with {kind.command}"
        )
    try:
        manifest = Manifest.from_json(row)
    except ValueError as error:
        raise StoreError(f"{folder / MANIFEST} is damaged ({error}): build the store again") from None
    if check:
        for file in manifest.files.values():
            _check_size(folder, file, BUILT_KINDS[manifest.kind].rebuild_advice)
    return manifest


def _check_size(folder: Path, file: StoredFile, advice: str) -> None:
    path = folder / file.name
    try:
        status = os.stat(path)
    except OSError:
        raise StoreError(f"{path} is missing: {advice}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        raise StoreError(f"{path} has {status.st_size:,} bytes instead of {file.bytes:,}: {advice}")


def require_store(manifest: Manifest, folder: Path, kind: str, tokenizer: TokenizerFingerprint | None = None) -> None:
    """Raise StoreError unless a store is of ``kind`` and, if ``tokenizer`` is given, was built with that tokenizer."""
    if manifest.kind != kind:
        raise StoreError(f"{folder} is a {manifest.kind} store, a {kind} store is needed: name another folder")
    if tokenizer and manifest.tokenizer != tokenizer:
        raise StoreError(
            f"{folder} was built with another tokenizer ({printable(manifest.tokenizer.fingerprint)[:40]}, "
            f"{manifest.tokenizer.vocab_size:,} tokens; the model has {tokenizer.fingerprint}, "
            f"{tokenizer.vocab_size:,}): give the model that it was built for with --model, or build it again with "
            f"{BUILT_KINDS[kind].command} --model MODEL"
        )


def damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names of the files whose content does not match its checksum in the manifest.

    Every byte is read. Raise StoreError if a file cannot be opened.
    """
    with ExitStack() as opened:
        # Open all files first, because reading takes long and the store may be replaced meanwhile.
        streams = [(file, opened.enter_context(_stream_of(folder / file.name))) for file in manifest.files.values()]
        return [file.name for file, stream in streams if _hash_of(stream) != file.sha256]


def _stream_of(path: Path) -> BinaryIO:
    with os_errors_as(StoreError, f"{path} cannot be read", "build the store again"):
        return open(path, "rb")


def _hash_of(stream: BinaryIO) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def file_checksum(path: Path) -> str:
    with open(path, "rb") as stream:
        return _hash_of(stream)


FolderCheck = Callable[[Path], None]
"""Function that raises StoreError if the store in a folder must not be replaced."""


class StoreBuild:
    """Store under construction. An old store in the folder stays in place until ``commit``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digits = secrets.token_hex(4)
        self._parts: dict[str, Path] = {}

    def path(self, part: str) -> Path:
        """Return the path of a part's file. The first call for a part creates the file, empty."""
        if part not in self._parts:
            self._parts[part] = self.scratch(part)
        return self._parts[part]

    def scratch(self, part: str) -> Path:
        """Create an empty file with the name of a part; the end of the build deletes it unless a manifest lists it."""
        path = self.folder / part_name(part, self._digits)
        create_empty(path)
        return path

    def commit(self, manifest: Manifest) -> Manifest:
        """Replace the manifest atomically, so that the store consists of the files that this build wrote.

        Return the manifest with sizes and checksums. Raise StoreError if another program wrote one meanwhile.
        """
        for path in self._parts.values():
            sync_to_disk(path)
        with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
            hashes = pool.map(file_checksum, self._parts.values())
        checksums = zip(self._parts.items(), hashes, strict=True)
        files = {part: StoredFile(path.name, path.stat().st_size, digest) for (part, path), digest in checksums}
        sources = tuple(replace(share, name=recorded_name(share.name)) for share in manifest.sources)
        model = manifest.model and replace(manifest.model, name=recorded_name(manifest.model.name))
        whole = replace(manifest, files=files, sources=sources, model=model)
        row = whole.to_json()
        parse_manifest(self.folder, json.dumps(row).encode(), check=False)  # raises if it cannot be read back
        if os.path.lexists(self.folder / MANIFEST) and not holds_manifest(self.folder):
            raise StoreError(f"{self.folder / MANIFEST} was written by another program meanwhile: choose another place")
        write_manifest(self.folder, self._digits, row)
        return whole


def recorded_name(name: str) -> str:
    """Return the name of an input or a model as manifests record it, with lone surrogates escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def check_replaceable(folder: Path, check: FolderCheck | None) -> None:
    """Raise StoreError unless a store can be built in a folder; ``check`` raises if an existing store must stay."""
    check_destination(folder)
    if check:
        check(folder)


@contextmanager
def building(folder: Path, check: FolderCheck | None = None) -> Iterator[StoreBuild]:
    """Build a store in ``folder`` while holding the folder's lock.

    On any error, an old store there stays unchanged. If there was none, nothing stays behind. Raise StoreError for an
    OSError in the block, or if another process holds the lock. ``check`` raises if the store in the folder must not be
    replaced. It is called under the lock, so that no other process can replace that store afterwards.
    """
    check_destination(folder)
    created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    fault = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        busy = StoreError(f"another build of {folder} is running: wait for it, or choose another place")
        with file_lock(folder / LOCK_FILE, busy):
            check_replaceable(folder, check)
            sweep_store(folder)
            try:
                yield StoreBuild(folder)
            except OSError as error:
                fault = write_fault(folder, error)  # before the unfinished files are deleted, which makes room
                raise
            finally:
                sweep_store(folder)
                if not os.path.lexists(folder / MANIFEST):
                    with suppress(PermissionError):  # Windows cannot delete an open file
                        (folder / LOCK_FILE).unlink(missing_ok=True)
    except OSError as error:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        raise StoreError(
            f"{folder} cannot be written ({fault or write_fault(existing, error)}): the store there, if any, is "
            "unchanged; make room, correct the permissions or choose another place"
        ) from error
    finally:
        with suppress(OSError):  # not empty
            for place in created:
                place.rmdir()


def delete_old_builds(folder: Path) -> None:
    """Delete the files that killed builds left in a store's folder; raise StoreError if the folder holds no store."""
    read_manifest(folder, check=False)
    with building(folder):
        pass  # it sweeps the folder under its lock


def refuse_replacing(folder: Path) -> None:
    """Raise StoreError if a folder holds a store, readable or not."""
    if not holds_manifest(folder):
        return
    try:
        manifest = read_manifest(folder, check=False)
        content = f"of {manifest.counts['tokens']:,} tokens" + (f" of {manifest.model.label}" if manifest.model else "")
    except StoreError:
        content = "that cannot be read"
    raise StoreError(
        f"{folder} holds a store {content}: add to it with hdtool add, merge with hdtool merge, build it anew with "
        "--replace, or choose another --out"
    )


def require_unchanged(manifest: Manifest) -> FolderCheck:
    """Return a function that raises StoreError unless a store still has this manifest.

    Without the check, a command that rewrites a store would lose the changes that another command has made since.
    """

    def check(folder: Path) -> None:
        if not (folder / MANIFEST).exists() or read_manifest(folder, check=False) != manifest:
            raise StoreError(f"{folder} was replaced by another command meanwhile: run this one again")

    return check


def sweep_store(folder: Path) -> None:
    """Delete the files of builds that a store's manifest does not name; see ``sweep``."""
    sweep(folder, lambda: {file.name for file in read_manifest(folder, check=False).files.values()}, BUILT_FILES)
