"""Stores on disk: whatever happens to a build, the old store stays whole and nothing half-built opens."""

from __future__ import annotations

import errno
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hdtool.data import demo
from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import BUILT_KINDS
from hdtool.data.stores.manifest import InputShare, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import building, damaged_files, read_manifest, require_store

MARK = TokenizerFingerprint("0123", 100)


def build(folder: Path, content: bytes, kind: str = "corpus") -> Manifest:
    with building(folder) as store:
        for part in BUILT_KINDS[kind].parts:
            store.path(part).write_bytes(content)
        share = InputShare("input.jsonl", "ab" * 32, 3, 17)
        counts = {"tokens": 17, "documents": 3}
        return store.commit(Manifest(kind, MARK, counts, {"token_bytes": 2}, (share,)))


def content_of(folder: Path) -> bytes:
    manifest = read_manifest(folder)
    assert damaged_files(folder, manifest) == []
    pieces = {(folder / file.name).read_bytes() for file in manifest.files.values()}
    (content,) = pieces
    return content


def test_a_store_says_again_what_was_written(tmp_path: Path) -> None:
    written = build(tmp_path / "store", b"abc")
    assert read_manifest(tmp_path / "store") == written
    assert content_of(tmp_path / "store") == b"abc"
    assert written.bytes == 15


def test_a_new_build_replaces_the_old_and_leaves_no_litter(tmp_path: Path) -> None:
    build(tmp_path, b"old", "model")
    build(tmp_path, b"new", "corpus")
    assert content_of(tmp_path) == b"new"
    assert len([path for path in tmp_path.iterdir() if path.name != ".lock"]) == len(BUILT_KINDS["corpus"].parts) + 1


def test_readers_keep_the_store_that_they_opened(tmp_path: Path) -> None:
    manifest = build(tmp_path, b"old")
    with open(tmp_path / manifest.files["heads"].name, "rb") as reader:
        build(tmp_path, b"new")
        assert reader.read() == b"old"


def test_a_failing_build_leaves_nothing_where_nothing_was(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "store"):
        with pytest.raises(ZeroDivisionError), building(folder) as store:
            store.path("heads").write_bytes(b"half")
            _ = 1 / 0
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    with pytest.raises(ZeroDivisionError), building(tmp_path / "shared"):
        (tmp_path / "shared" / "mine.txt").write_text("mine")
        _ = 1 / 0
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["mine.txt"]


SLOW_BUILD = """
import sys, time
from pathlib import Path
from tests.data.test_store import build
print("begun", flush=True)
while True:
    build(Path(sys.argv[1]), bytes([int(time.time() * 1000) % 256]) * 300_000)
"""


@pytest.mark.parametrize("times", [6, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_killed_builds_leave_the_old_store_or_a_new_one(times: int, tmp_path: Path) -> None:
    """A process that builds without pause is killed at a random moment."""
    build(tmp_path, b"old")
    rng = random.Random(0)
    seen = set()
    for _ in range(times):
        with subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.readline() == b"begun\n"
            time.sleep(rng.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        seen.add(content_of(tmp_path)[:1])
    assert len(seen) > 1, "no build was ever finished: the kills came too early to test anything"
    build(tmp_path, b"last")
    assert content_of(tmp_path) == b"last"
    assert len(list(tmp_path.iterdir())) == len(BUILT_KINDS["corpus"].parts) + 2


def test_two_builds_of_one_store_do_not_mix(tmp_path: Path) -> None:
    with building(tmp_path), pytest.raises(StoreError, match=r"another build of .* is running"):
        build(tmp_path, b"second")
    build(tmp_path, b"after")
    assert content_of(tmp_path) == b"after"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_no_more_is_named(code: int, tmp_path: Path) -> None:
    build(tmp_path, b"old")
    with (
        pytest.raises(StoreError, match=r"cannot be written .*the store there, if any, is unchanged"),
        building(tmp_path),
    ):
        raise OSError(code, "no")
    assert content_of(tmp_path) == b"old"


def test_a_full_disk_is_told_from_its_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the unfinished files are deleted; LMDB says only that a write failed, and numpy how much it wrote."""
    build(tmp_path, b"old")
    usage = shutil.disk_usage(tmp_path)

    def free(_: Path) -> Any:
        return usage._replace(free=0 if list(tmp_path.glob("documents-*.bin"))[1:] else 1 << 30)

    monkeypatch.setattr(shutil, "disk_usage", free)
    full = r"\(the disk is full, 0 MiB free\): the store there, if any, is unchanged"
    for said in ("LMDB: mdb_txn_commit: Input/output error", "16384 requested and 3072 written"):
        with pytest.raises(StoreError, match=full), building(tmp_path) as begun:
            begun.path("documents")
            raise OSError(said)
        with pytest.raises(StoreError, match=rf"\(the disk is full or failing: {said}\)"), building(tmp_path):
            raise OSError(said)
    assert content_of(tmp_path) == b"old"


def test_other_kinds_and_tokenizers_are_refused(tmp_path: Path) -> None:
    manifest = build(tmp_path, b"x")
    require_store(manifest, tmp_path, "corpus", MARK)
    with pytest.raises(StoreError, match="is a corpus store, a model store is needed"):
        require_store(manifest, tmp_path, "model")
    with pytest.raises(StoreError, match=r"another tokenizer \(0123, 100 tokens; the model has 4567, 200\)"):
        require_store(manifest, tmp_path, "corpus", TokenizerFingerprint("4567", 200))


def test_a_fingerprint_tells_tokenizers_apart(tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # not above: the processes that are killed shall start at once

    whole = AutoTokenizer.from_pretrained(demo.MODEL)
    mark = TokenizerFingerprint.of(whole)
    assert mark == TokenizerFingerprint.of(AutoTokenizer.from_pretrained(demo.MODEL))
    assert mark.vocab_size == 4096
    whole.add_tokens(["<new>"])
    assert TokenizerFingerprint.of(whole) != mark
    whole.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["model"]["merges"].reverse()  # the same words, cut otherwise
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert (
        TokenizerFingerprint.of(AutoTokenizer.from_pretrained(tmp_path)).fingerprint
        != TokenizerFingerprint.of(whole).fingerprint
    )
