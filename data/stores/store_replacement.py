"""The replacement of a store: a build writes new files, and a new manifest makes them the store.

The manifest is replaced atomically when all files are written. Until then the old store stays complete, and readers of
the old one keep the files that they have opened. Files of builds that the manifest does not name are leftovers of a
killed build; the next build deletes them. Other files in the folder are neither deleted nor changed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hdtool.data.errors import StoreError
from hdtool.data.files.atomic_write import to_disk
from hdtool.data.files.locking import exclusive
from hdtool.data.stores.manifest import Manifest, StoredFile
from hdtool.data.stores.store import checksum, parse_manifest, read_manifest
from hdtool.data.stores.store_files import (
    LOCK,
    MANIFEST,
    check_destination,
    create,
    delete_leftovers,
    holds_manifest,
    part_name,
    write_manifest,
)

FolderCheck = Callable[[Path], None]
"""Raises if the store in a folder must stay."""


class StoreBuild:
    """A store under construction; an old store in the folder stays until ``commit``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digits = secrets.token_hex(4)
        self._parts: dict[str, Path] = {}

    def path(self, part: str) -> Path:
        """The new, empty file for a part."""
        if part not in self._parts:
            self._parts[part] = self.scratch(part)
        return self._parts[part]

    def scratch(self, part: str) -> Path:
        """A new, empty file with the name of a part that is deleted when the build ends."""
        path = self.folder / part_name(part, self._digits)
        create(path)
        return path

    def commit(self, manifest: Manifest) -> Manifest:
        """Replace the manifest atomically, so that the written files become the store."""
        for path in self._parts.values():
            to_disk(path)
        with ThreadPoolExecutor() as pool:  # reading and hashing release the interpreter lock
            hashes = pool.map(checksum, self._parts.values())
        found = zip(self._parts.items(), hashes, strict=True)
        files = {part: StoredFile(path.name, path.stat().st_size, digest) for (part, path), digest in found}
        sources = tuple(replace(share, name=recorded_name(share.name)) for share in manifest.sources)
        model = manifest.model and replace(manifest.model, name=recorded_name(manifest.model.name))
        whole = replace(manifest, files=files, sources=sources, model=model)
        row = whole.to_json()
        parse_manifest(self.folder, json.dumps(row).encode(), check=False)  # check that it can be read
        if os.path.lexists(self.folder / MANIFEST) and not holds_manifest(self.folder):
            raise StoreError(f"{self.folder / MANIFEST} was written by another program meanwhile: choose another place")
        write_manifest(self.folder, self._digits, row)
        return whole


def recorded_name(name: str) -> str:
    """The name of an input as manifests record it: bytes that are not valid text are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


@contextmanager
def building(folder: Path, check: FolderCheck | None = None) -> Iterator[StoreBuild]:
    """Build a store at ``folder`` while no other process does; on any error, an old store there stays as it was.

    ``check`` raises if the store in the folder must stay. It is called while no other process can replace that store.
    """
    check_destination(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        busy = StoreError(f"another build of {folder} is running: wait for it, or choose another place")
        with exclusive(folder / LOCK, busy):
            check_destination(folder)
            if check:
                check(folder)
            sweep(folder)
            try:
                yield StoreBuild(folder)
            finally:
                sweep(folder)
    except OSError as error:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        room = f", {shutil.disk_usage(there).free >> 20} MiB free there" if error.errno == 28 else ""
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}{room}): the store there, if any, is unchanged; "
            "make room, correct the permissions or choose another place"
        ) from error


def refuse_replacing(folder: Path) -> None:
    """Raise if a store is there, whether it can be read or not."""
    if not holds_manifest(folder):
        return
    try:
        found = read_manifest(folder, check=False)
        content = f"of {found.counts['tokens']:,} tokens" + (f" of {found.model.label}" if found.model else "")
    except StoreError:
        content = "that cannot be read"
    raise StoreError(
        f"{folder} holds a store {content}: add to it with hdtool add, merge with hdtool merge, build it anew with "
        "--replace, or choose another --out"
    )


def unchanged(manifest: Manifest) -> FolderCheck:
    """Raise unless the store is still the one that a new store is made from: changes since would be lost."""

    def check(folder: Path) -> None:
        if not (folder / MANIFEST).exists() or read_manifest(folder, check=False) != manifest:
            raise StoreError(f"{folder} was replaced by another command meanwhile: run this one again")

    return check


def sweep(folder: Path) -> None:
    """Delete the files of builds that the manifest does not name: leftovers of killed builds and replaced files."""
    kept: set[str] = set()
    if os.path.lexists(folder / MANIFEST):
        try:
            kept = {file.name for file in read_manifest(folder, check=False).files.values()}
        except StoreError:
            return  # of another format, or damaged: its files go once a new manifest is there
    delete_leftovers(folder, kept)
