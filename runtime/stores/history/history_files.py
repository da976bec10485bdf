"""The files of a history store: created, opened, lengthened, and made anew with some of their conversations.

A store is made anew when something is dropped, and when places would get too large numbers; when it grows, its files
become longer. The caller holds the lock of the conversations meanwhile, so nothing is appended to files that are about
to be replaced; other processes find the new manifest the next time they append or refresh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from hdtool.data.errors import StoreError, reason_of
from hdtool.data.files.atomic_write import to_disk
from hdtool.data.stores.history_manifest import (
    FILES,
    LARGEST_BYTES,
    LOCK_ENDING,
    HistoryManifest,
    folder_lock,
    is_new,
    leftovers,
    new_build,
    read_history_manifest,
    stamp_of,
    sweep_history,
)
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_files import MANIFEST, create, write_manifest
from hdtool.runtime.stores.history.history_records import Conversation, Records, State
from hdtool.runtime.stores.history.history_ring import HistoryRing, create_ring

MOST_BYTES = 256 << 20
"""Bytes on the disk, unless another bound is given."""
PLACE_BYTES = 12
"""Bytes of a place on the disk: its token, its link, its share of the chains, and its share of the conversations."""
SMALLEST, FEWEST = 1 << 16, 1 << 8
"""Places of a new store, and of a store with a smaller bound than those take."""
FILLED = 0.875
"""Part of the places that are used if a store is made anew with fewer of them."""
PRIVATE = 0o700
"""Mode of a new folder: a history holds text of conversations. A folder that is there keeps its mode."""
OPENINGS = 10
"""Attempts to open a store that is replaced again and again."""


class OpenFiles(NamedTuple):
    """A store whose files are open."""

    manifest: HistoryManifest
    stamp: tuple[int, int]
    ring: HistoryRing
    records: Records


def most_places(most_bytes: int) -> int:
    """The places of a store of this size."""
    return max(FEWEST, 1 << (most_bytes // PLACE_BYTES).bit_length() - 1)


@contextmanager
def worded(folder: Path) -> Iterator[None]:
    """Turn faults of the system and of LMDB into a ``StoreError``."""
    try:
        yield
    except lmdb.InvalidError as error:
        raise StoreError(f"{folder} is damaged ({reason_of(error)}): {advice(folder)}") from None
    except lmdb.Error as error:
        raise StoreError(
            f"{folder} cannot be used (LMDB: {reason_of(error)}): make room, or {advice(folder)}"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}): make room, correct the permissions or choose "
            "another place"
        ) from error


def advice(folder: Path) -> str:
    return f"delete {folder} to begin a new history"


def create_if_new(folder: Path, tokenizer: TokenizerFingerprint, model: str, most_bytes: int) -> None:
    """Create an empty store unless there is one; a folder of other files is refused."""
    if not 1 <= most_bytes <= LARGEST_BYTES:
        raise StoreError(
            f"a history store takes 1 to {LARGEST_BYTES:,} bytes, not {most_bytes:,}: choose another bound"
        )
    with worded(folder):
        if not is_new(folder):
            return
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        with folder_lock(folder):
            if is_new(folder):
                size = min(SMALLEST, most_places(most_bytes))
                _write(folder, HistoryManifest(tokenizer, model, most_bytes, size, new_build()), None, ())


def sweep_if_killed(folder: Path) -> None:
    """Delete what a command left that was killed while it made a store anew: dropped conversations may be in it."""
    with worded(folder):
        if leftovers(folder, read_history_manifest(folder)):
            with folder_lock(folder):
                sweep_history(folder, read_history_manifest(folder))


def open_files(folder: Path, *, writable: bool = True) -> OpenFiles:
    """The files that the manifest names; opened again if it is replaced meanwhile."""
    for _ in range(OPENINGS):
        # Before the manifest is read: if it is replaced in between, the files are opened again at the next append.
        # The other way round, what is appended would go into files that nobody reads any more.
        stamp = _stamp(folder)
        manifest = read_history_manifest(folder)
        try:
            with worded(folder):
                ring = HistoryRing(folder, manifest, writable=writable)
                records = Records.of(manifest.path(folder, "conversations"), most_places(manifest.most_bytes))
                return OpenFiles(manifest, stamp, ring, records)
        except StoreError as error:
            if read_history_manifest(folder) == manifest:
                known = str(error).startswith(f"{folder} ")
                raise error if known else StoreError(f"{error}: {advice(folder)}") from None
    raise StoreError(f"{folder} was replaced {OPENINGS} times while it was opened: wait for the commands to end")


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        return stamp_of(folder / MANIFEST)
    except OSError:
        return 0, 0  # reading the manifest says what is wrong


def lengthen(folder: Path, old: OpenFiles, size: int) -> None:
    """Let a store have more places. Nothing is moved, and a store whose files are too long already is whole."""
    with folder_lock(folder):
        old.ring.lengthen(size)
        for part in ("ring", "chains"):
            to_disk(old.manifest.path(folder, part))
        write_manifest(folder, old.manifest.build, replace(old.manifest, size=size).to_json())


def make_anew(
    folder: Path,
    old: OpenFiles,
    kept: Sequence[Conversation],
    *,
    size: int,
    most_bytes: int | None = None,
) -> None:
    """Replace the files by new ones with these conversations, the oldest first; of too many, the latest ones stay."""
    manifest = replace(old.manifest, size=size, build=new_build(), most_bytes=most_bytes or old.manifest.most_bytes)
    with folder_lock(folder):
        _write(folder, manifest, old.ring, _latest(kept, size))


def _latest(kept: Sequence[Conversation], size: int) -> Sequence[Conversation]:
    """The latest conversations that leave some places of a ring."""
    places = np.cumsum([0, *(1 + each.before + each.tokens for each in reversed(kept))])
    if places[-1] <= size:
        return kept
    return kept[len(kept) + 1 - int(np.searchsorted(places, FILLED * size, "right")) :]


def _write(folder: Path, manifest: HistoryManifest, old: HistoryRing | None, kept: Sequence[Conversation]) -> None:
    """Write the files of a manifest, then the manifest, then delete the files that it replaces."""
    try:
        ring, end = create_ring(folder, manifest), 0
        moved = []
        if old and kept:
            spans = np.array([(each.first, each.before, each.tokens) for each in kept])
            end = ring.append_spans(old, spans)
            firsts = np.cumsum(1 + spans[:, 1] + spans[:, 2]) - spans[:, 2]
            moved = [each._replace(number=n, first=int(firsts[n])) for n, each in enumerate(kept)]
        path = manifest.path(folder, "conversations")
        create(path)
        Records.created(path, most_places(manifest.most_bytes), State(end, len(moved)), moved)
        for part in ("ring", "chains"):
            to_disk(manifest.path(folder, part))
        write_manifest(folder, manifest.build, manifest.to_json())
    except BaseException:
        for part in FILES:
            for ending in ("", LOCK_ENDING):
                path = manifest.path(folder, part)
                with suppress(OSError):
                    path.with_name(path.name + ending).unlink()
        raise
    sweep_history(folder, manifest)
