"""What the system does to stores: files that cannot grow, and many processes on one store."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import damaged_files, read_manifest
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore

BUILDS: dict[str, Callable[..., Manifest]] = {"corpus": build_corpus_index, "model": build_model_store}
VOCABULARY = 500


def build(kind: str, folder: Path, documents: int) -> Manifest:
    rng = np.random.default_rng(0)
    given = (Document(rng.integers(0, VOCABULARY, 200)) for _ in range(documents))
    return BUILDS[kind](folder, given, TokenizerFingerprint("test", VOCABULARY), [InputFile("made", "0")])


@contextmanager
def little_room(room: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``room`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [50_000, 210_000, 300_000])
@pytest.mark.parametrize("kind", BUILDS)
def test_files_that_cannot_grow_leave_the_old_store_whole(kind: str, room: int, tmp_path: Path) -> None:
    """Wherever in the build the room ends: in the documents, in the suffixes or in LMDB's file."""
    build(kind, tmp_path, 20)
    old = read_manifest(tmp_path)
    with little_room(room), pytest.raises(StoreError, match=r"cannot be written .*is unchanged") as raised:
        build(kind, tmp_path, 500)
    assert "File too large" in str(raised.value) or "the disk is full or failing: " in str(raised.value)
    assert read_manifest(tmp_path) == old
    assert damaged_files(tmp_path, old) == []
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in old.files.values()} | {
        "manifest.json",
        ".lock",
    }


def read_all(folder: Path, ready: Any, share: Any) -> None:
    """Touch every page of both stores, wait for the others, and tell how much memory of each is one's own share."""
    model, corpus = ModelStore(folder / "model"), CorpusIndex(folder / "corpus")
    arrays = {"model": (model.slots, model.keys, model.rows), "corpus": corpus.shards}
    totals = {kind: sum(int(array.sum(dtype=np.int64)) for array in of_kind) for kind, of_kind in arrays.items()}
    ready.wait()
    share.put({kind: (totals[kind], proportional(str(folder / kind))) for kind in BUILDS})
    ready.wait()  # whoever leaves early gives its share to the others


def proportional(folder: str) -> int:
    """Bytes of this process's maps of files under a folder, each page divided by the processes that map it."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            inside = folder in line
        elif inside and first == "Pss:":
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells the shares")
@pytest.mark.long
def test_processes_share_one_copy(tmp_path: Path) -> None:
    sizes = {kind: build(kind, tmp_path / kind, 1000).bytes for kind in BUILDS}
    context = multiprocessing.get_context("spawn")
    ready, shares = context.Barrier(2), context.Queue()
    workers = [context.Process(target=read_all, args=(tmp_path, ready, shares)) for _ in range(2)]
    for worker in workers:
        worker.start()
    told = [shares.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    for kind, size in sizes.items():
        assert len({one[kind][0] for one in told}) == 1
        assert 0 < sum(one[kind][1] for one in told) <= 1.1 * size
