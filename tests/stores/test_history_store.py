"""The history store: nothing that was committed is lost, and nothing that was dropped is left."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.builders.stores import edit_store
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.edit_store import HistoryDocuments, drop_conversations, history_folders
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.cli.store_output import verify_conversations
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores import history_manifest
from hdtool.data.stores.history_manifest import DEFAULT_SOURCE, HistoryManifest, read_history_manifest
from hdtool.data.stores.kinds import HISTORY
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_file_names import (
    LMDB_LOCK_ENDING,
    MANIFEST,
    refuse_other_files,
    write_manifest,
)
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.stores_at_home import history_at_home
from hdtool.runtime.stores import history_ring, history_store
from hdtool.runtime.stores.history_metadata import MIN_POSITIONS_PER_CONVERSATION, StoredConversation
from hdtool.runtime.stores.history_ring import (
    MAX_STORE_BYTES,
    MIN_STORE_POSITIONS,
    NEW_STORE_POSITIONS,
    create_if_new,
)
from hdtool.runtime.stores.history_store import History, HistoryStore
from hdtool.runtime.stores.inspect_store import continuations, description, latency_of
from hdtool.runtime.stores.model_store import sequence_hash
from hdtool.runtime.stores.token_log import (
    MAX_MATCHES,
    OVERLAP_TOKENS,
    PREVIOUS,
    TOKEN,
    end_of,
    entries_of,
    latest,
    matches,
)

VOCABULARY = 60_000
MARK = TokenizerFingerprint("test", VOCABULARY)
MODEL = "0123456789abcdef"
SMALL = 12 * MIN_STORE_POSITIONS
"""A bound in bytes of as many places as a store has at least."""
PLANTED = [54_321, 12_345, 54_123]


def opened(folder: Path, max_bytes: int = MAX_STORE_BYTES) -> HistoryStore:
    """A store with this bound, or the one that is there."""
    create_if_new(folder, MARK, MODEL, max_bytes)
    return HistoryStore.open(folder, MARK, MODEL)


def held(store: HistoryStore) -> list[list[int]]:
    """All answers that are kept."""
    everything = store.conversations()
    answers = [tokens.tolist() for _, tokens in store.answers(everything)]
    assert len(answers) == len(everything), "the tokens of each conversation are there"
    return answers


def found(store: HistoryStore, *context: int) -> list[int]:
    """The tokens that followed a context, the latest first."""
    places, _ = matches(store.log, np.array(context))
    return [int(store.tokens(place, 1)[0]) for place in places.tolist()]


def on_chain(store: HistoryStore, first: int, second: int) -> list[int]:
    """The tokens that followed a pair, on its whole chain."""
    log, followers = store.log[0], []
    entries, mask = entries_of(log), int(log["size"]) - 1
    position = int(latest(log, np.uint64(sequence_hash(np.array([first, second], np.int64), 0, 2)), end_of(log)))
    while position > 0:
        if [int(entries[(position - back) & mask, TOKEN]) for back in (2, 1)] == [first, second]:
            followers.append(int(entries[position & mask, TOKEN]))
        position = int(entries[position & mask, PREVIOUS])
    return followers


# Reading and writing ---------------------------------------------------------------------------------


def test_what_was_said_is_found_again(tmp_path: Path) -> None:
    store = opened(tmp_path / "new" / "store")
    address = store.log.ctypes.data
    assert store.append([1, 2, 3, 4], [9, 8])
    assert store.append([1, 2, 5], [])
    assert held(store) == [[1, 2, 3, 4], [1, 2, 5]]
    assert found(store, 1, 2) == [5, 3]
    assert found(store, 9, 8) == [1], "the start of an answer follows the end of its prompt"
    assert found(store, 4, 1) == [], "no match crosses from one conversation into the next"
    again = opened(tmp_path / "new" / "store")
    assert held(again) == held(store)
    assert found(again, 1, 2) == [5, 3]
    assert store.log.ctypes.data == address


def test_the_store_grows_up_to_its_bound(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=12 * 4 * NEW_STORE_POSITIONS)
    address, sizes, said = store.log.ctypes.data, set(), []
    rng = np.random.default_rng(0)
    for _ in range(300):
        answer = rng.integers(0, VOCABULARY, 1000).tolist()
        assert store.append(answer, answer[:3])
        said.append(answer)
        sizes.add(int(store.log["size"][0]))
    assert sizes == {NEW_STORE_POSITIONS, 2 * NEW_STORE_POSITIONS, 4 * NEW_STORE_POSITIONS}
    assert store.nbytes <= 12 * 4 * NEW_STORE_POSITIONS
    assert store.log.ctypes.data == address
    kept = held(store)
    assert len(kept) > 200 and kept == said[-len(kept) :], "the oldest conversations went first"
    assert found(store, *said[-1][:2])[0] == said[-1][2]
    assert len(list(tmp_path.iterdir())) == len(HISTORY.parts) + 3, "no file of a smaller ring is left"


def test_growth_may_be_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 12
    monkeypatch.setattr(history_ring, "NEW_STORE_POSITIONS", size)
    store, other = opened(tmp_path, max_bytes=12 * 4 * size), opened(tmp_path)
    said: list[list[int]] = []

    def whole(store: HistoryStore, places: int) -> None:
        assert int(store.log["size"][0]) == places and held(store) == said
        for answer in said:
            assert on_chain(store, *answer[:2]) == [answer[2]]

    for number in range(12):
        said.append([*range(1000 * number, 1000 * number + 300)])
        assert store.append(said[-1], [])
    whole(store, size)
    other.refresh()
    with monkeypatch.context() as patched:
        patched.setattr(history_ring, "write_manifest", no_room)
        with pytest.warns(RuntimeWarning, match="is not kept on the disk"):
            assert not store.append([9] * 600, [])
    whole(opened(tmp_path), size)
    for number in range(12, 24):
        said.append([*range(1000 * number, 1000 * number + 300)])
        assert store.append(said[-1], [])
    whole(store, 2 * size)
    for answer in said[:12]:
        assert found(other, *answer[:2]) == [answer[2]], "until it refreshes, it reads the smaller ring"
    other.refresh()
    whole(other, 2 * size)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_answer_that_is_longer_than_the_store_keeps_its_end(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=SMALL)
    answer = list(range(3 * MIN_STORE_POSITIONS))
    assert store.append(answer, [7])
    (kept,) = held(store)
    assert kept == answer[-len(kept) :] and len(kept) > MIN_STORE_POSITIONS // 3


def test_short_answers_do_not_outgrow_the_bound(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=12 * 2 * NEW_STORE_POSITIONS)
    for number in range(3000):
        assert store.append([number, 1], [])
    assert store.nbytes <= 12 * 2 * NEW_STORE_POSITIONS
    assert held(store)[-1] == [2999, 1]


ANSWER = st.tuples(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=12))


@given(st.lists(st.one_of(ANSWER, st.sampled_from(["open", "other", "drop"])), max_size=40))
def test_a_store_equals_a_list(actions: list[Any]) -> None:
    """Appended to, opened again, used by two and dropped from, it holds the latest answers of a plain list."""
    with TemporaryDirectory() as folder:
        store, other = opened(Path(folder), max_bytes=4 * SMALL), opened(Path(folder))
        said: list[list[int]] = []
        for act in actions:
            if act == "open":
                store = opened(Path(folder))
            elif act == "other":
                store, other = other, store
                store.refresh()
            elif act == "drop":
                store.keep(lambda each: each.tokens % 2 == 0)
                said = [answer for answer in said if len(answer) % 2 == 0]
            else:
                tokens, prompt = act
                assert store.append(tokens, prompt)
                said += [tokens] if tokens else []
            kept = held(store)
            assert kept == said[len(said) - len(kept) :]
            assert sum(map(len, kept)) >= min(sum(map(len, said)), MIN_STORE_POSITIONS // 3)
            said = kept
            for tail in [(0, 0), (1, 2), (3, 1)]:
                after = {
                    answer[at]
                    for answer in kept
                    for at in range(2, len(answer))
                    if (answer[at - 2], answer[at - 1]) == tail
                }
                assert after <= set(found(store, *tail)) or len(found(store, *tail)) > 40


# The right store -------------------------------------------------------------------------------------


def test_another_tokenizer_or_model_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(StoreError, match=r"another tokenizer \(test, 60,000 tokens; more, 70,000 is needed\): name"):
        HistoryStore.open(tmp_path, TokenizerFingerprint("more", 70_000), MODEL)
    with pytest.raises(StoreError, match=rf"of another model \({MODEL}; fedcba9876543210 is needed\): name"):
        HistoryStore.open(tmp_path, MARK, "fedcba9876543210")


def test_the_home_has_a_folder_for_each_model(home: Path) -> None:
    assert history_at_home(MODEL, MARK) == home / "stores" / "test" / "history" / MODEL
    assert history_at_home(MODEL, MARK, "tenant").is_relative_to(home / "namespaces" / "tenant")


@pytest.mark.parametrize("name", ["thesis.tex", "ring-0123abcd.txt", "ring-0123ABCD.bin", "heads-0123abcd.bin"])
def test_a_folder_of_other_files_is_refused_untouched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("years of work")
    with pytest.raises(StoreError, match=f"holds no history store, but other files, such as {name}: choose"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_files_beside_a_store_stay(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    target = tmp_path / "elsewhere"
    target.write_text("elsewhere")
    (tmp_path / "store" / "notes.txt").write_text("mine")
    (tmp_path / "store" / "ring-0123abcd.bin").symlink_to(target)
    (tmp_path / "store" / "chains-0123abcd.bin").write_bytes(b"left by a killed command")
    store.append([1, 2, 3], [])
    store.keep(lambda _: False)
    assert (tmp_path / "store" / "notes.txt").read_text() == "mine"
    assert target.read_text() == "elsewhere" and (tmp_path / "store" / "ring-0123abcd.bin").is_symlink()
    assert not (tmp_path / "store" / "chains-0123abcd.bin").exists()


def test_no_build_replaces_a_history(tmp_path: Path) -> None:
    opened(tmp_path / "history").append(list(range(9)), [])
    before = {path.name: path.read_bytes() for path in (tmp_path / "history").iterdir()}
    source, documents = [InputFile("some", "0" * 64)], [Document(list(range(9)))]
    with pytest.raises(StoreError, match="holds a history store, which no build replaces: choose"):
        build_model_store(tmp_path / "history", documents, MARK, source)
    with pytest.raises(StoreError, match="holds a history store, which no build replaces: choose"):
        edit_store.merge([tmp_path / "history"], tmp_path / "history")
    with pytest.raises(StoreError, match="is a history store, a model store or a corpus index is needed"):
        edit_store.merge([tmp_path / "history"], tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "history").iterdir()} == before
    build_corpus_index(tmp_path / "index", documents, MARK, source, executor=BuildExecutor(1))
    with pytest.raises(StoreError, match="is of the kind corpus, a history store is needed: name another folder"):
        opened(tmp_path / "index")


# Damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, HistoryManifest]:
    store = opened(tmp_path / "store")
    for number in range(2000):
        store.append([number, number + 1, number + 2], [5, 6])
    return store.folder, store.manifest


@pytest.mark.parametrize("part", HISTORY.parts)
@pytest.mark.parametrize("size", [None, 0, 1, 5_000, 20_000, -1])
@pytest.mark.one_in(2)
def test_a_file_that_is_cut_off_is_named(part: str, size: int | None, written: tuple[Path, HistoryManifest]) -> None:
    folder, manifest = written
    path = manifest.path(folder, part)
    if size is None:
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:size])
    with pytest.raises(StoreError, match=rf"{folder}.*: delete {folder} to begin a new history$"):
        opened(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, "is a history store of format 99, this hdtool reads format 1: delete"),
        ({"kind": "diary"}, "is of the kind diary, a history store is needed: name another folder"),
        ({"options": {"most_bytes": 1, "size": 100}}, r"is damaged \(size is no power of two\): delete"),
        ({"files": {"ring": "ring-../etc.bin"}}, r"is damaged \(its files have other names"),
        ({"tokenizer": None}, r"is damaged \(tokenizer is not an object\)"),
    ],
)
def test_a_damaged_manifest_is_named(change: dict[str, Any], said: str, written: tuple[Path, HistoryManifest]) -> None:
    folder, manifest = written
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json() | change))
    with pytest.raises(StoreError, match=said):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_no_json_is_named(content: bytes, written: tuple[Path, HistoryManifest]) -> None:
    (written[0] / MANIFEST).write_bytes(content)
    with pytest.raises(StoreError, match=r"cannot be read .*: delete"):
        opened(written[0])


OPEN = """
import sys
from pathlib import Path
from hdtool.data.errors import StoreError
from hdtool.runtime.stores.history_store import HistoryStore
for line in sys.stdin:
    try:
        store = HistoryStore(Path(line.strip()))
        list(store.answers(store.conversations()))
        store.append([1, 2, 3], [])
        print("opened", flush=True)
    except StoreError as error:
        print(error, flush=True)
"""


def test_bytes_that_changed_end_no_process(tmp_path: Path, written: tuple[Path, HistoryManifest]) -> None:
    """LMDB itself would read what a damaged page points to."""
    folder, manifest = written
    rng = random.Random(0)
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", OPEN], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin and process.stdout
        seen = []
        for number in range(60):
            copy = tmp_path / str(number)
            shutil.copytree(folder, copy)
            part = list(HISTORY.parts)[number % 4 % 3]
            path = manifest.path(copy, part)
            content = bytearray(path.read_bytes())
            start = rng.randrange(len(content))
            for at in range(start, min(start + 4096, len(content))) if number % 8 else [start]:
                content[at] = rng.randrange(256)
            path.write_bytes(content)
            process.stdin.write(f"{copy}\n")
            process.stdin.flush()
            seen.append(process.stdout.readline())
            assert seen[-1], f"damage of {part} ended the process"
            shutil.rmtree(copy)
    assert len(set(seen)) > 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not a folder, one is needed"):
        opened(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written"):
        opened(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match="holds no history store: name"):
        HistoryStore(tmp_path / "none")


# Several processes -----------------------------------------------------------------------------------

WRITE = """
import sys
from pathlib import Path
from tests.support.histories import write
write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""


def writer(folder: Path, name: int, count: int, size: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITE, str(folder), str(name), str(count), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_two_processes_append_and_a_third_reads(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", max_bytes=64 << 20)
    processes = [writer(tmp_path / "store", name, 400, 200) for name in (1, 2)]
    seen = 0
    while any(process.poll() is None for process in processes):
        store.refresh()
        kept = store.conversations()
        assert len(kept) >= seen
        seen = len(kept)
        time.sleep(0.01)
    for process in processes:
        assert process.communicate() and process.returncode == 0
    store.refresh()
    answers = held(store)
    for name in (1, 2):
        assert [answer[1] for answer in answers if answer[0] == name] == list(range(400)), "each appended in order"
    assert found(store, 1, 399) != []
    assert seen, "the reader saw what others appended"


@pytest.mark.long
def test_nothing_is_lost_while_another_process_drops(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", max_bytes=64 << 20)
    processes = [writer(tmp_path / "store", name, 300, 20) for name in (1, 2)]
    drops = 0
    while any(process.poll() is None for process in processes):
        assert store.append([3, 2, 1], [], "noise")
        drops += len(drop_conversations(tmp_path / "store", source="noise"))
    for process in processes:
        assert process.communicate() and process.returncode == 0
    answers = held(opened(tmp_path / "store"))
    assert sorted(answer[:2] for answer in answers) == [[name, number] for name in (1, 2) for number in range(300)]
    assert drops > 3


def test_nothing_is_lost_if_the_store_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that was read and the stamp that tells whether it is current must not be of two stores."""
    mixed_store(tmp_path)

    def then_dropped(folder: Path) -> Any:
        manifest = read_history_manifest(folder)
        monkeypatch.setattr(history_ring, "read_history_manifest", read_history_manifest)
        monkeypatch.setattr(history_ring, "sweep_history", lambda *_: None)  # the old files are still there
        drop_conversations(folder, source="secret")
        return manifest

    monkeypatch.setattr(history_store, "delete_rebuild_leftovers", lambda folder: None)
    monkeypatch.setattr(history_ring, "read_history_manifest", then_dropped)
    assert HistoryStore(tmp_path).append([7, 8, 9], [], "public")
    assert held(opened(tmp_path))[-1] == [7, 8, 9]


def test_files_of_a_killed_command_go_when_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop that was killed after the manifest was replaced leaves the old files."""
    mixed_store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(history_ring, "sweep_history", lambda *_: None)
        drop_conversations(tmp_path, source="secret")
    assert planted_in(tmp_path)
    opened(tmp_path)
    assert planted_in(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == len(HISTORY.parts) + 3


def test_a_reader_sees_nothing_before_it_refreshes(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path)
    for _ in range(10):
        other.append([1, 2, 3], [])
    assert found(store, 1, 2) == [] and not store.num_positions
    store.refresh()
    assert found(store, 1, 2) == [3] * 10
    for _ in range(20):
        other.append([1, 2, 4], [])
    assert found(store, 1, 2) == [3] * 10, "places above the committed end are skipped"


def test_a_forked_process_reads_and_appends(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.append([1, 2, 3], [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        child = os.fork()
    if not child:
        ended = 1
        try:
            store.refresh()
            ended = 0 if store.append([1, 2, 4], []) and found(store, 1, 2) == [4, 3] else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.refresh()
    assert store.append([1, 2, 5], [])
    assert held(store) == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert found(store, 1, 2) == [5, 4, 3]


def test_a_store_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path)
    store.append([1, 2, 3], [], "one")
    other.append([1, 2, 4], [], "two")
    assert [(each.source, each.tokens) for each in drop_conversations(tmp_path, source="one")] == [("one", 3)]
    assert other.append([1, 2, 5], [])
    store.refresh()
    assert held(store) == [[1, 2, 4], [1, 2, 5]]
    assert found(store, 1, 2) == [5, 4]


def test_a_store_that_was_deleted_is_one_warning(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    store.append([1, 2, 3], [])
    shutil.rmtree(tmp_path / "store")
    with pytest.warns(RuntimeWarning, match="the history is not kept on the disk") as caught:
        store.refresh()
        assert not store.append([1, 2, 3], [])
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert found(store, 1, 2) == []
    opened(tmp_path / "store").append([1, 2, 4], [])
    store.refresh()
    assert held(store) == [[1, 2, 4]] and not store.fault


def test_short_answers_stay_while_the_store_can_grow(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    every = [[number, 1, 2, 3] for number in range(NEW_STORE_POSITIONS // MIN_POSITIONS_PER_CONVERSATION + 100)]
    assert all(store.append(answer, []) for answer in every)
    assert held(store) == every


@pytest.mark.parametrize(
    "times", [pytest.param(5, marks=pytest.mark.long), pytest.param(40, marks=pytest.mark.exhaustive)]
)
def test_kills_at_random_moments_lose_nothing(times: int, tmp_path: Path) -> None:
    """Kills processes while they append to a history."""
    # Room for all that forty processes append: the oldest must not go.
    folder, rng, kept = tmp_path / "store", random.Random(times), 0
    store = opened(folder, max_bytes=192 << 20)
    for number in range(times):
        with writer(folder, number, 1 << 30, 60) as process:
            assert process.stdout and process.stdout.readline() == b"begun\n"
            time.sleep(rng.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            told = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
        store.refresh()
        held(store)
        answers = [tokens for each, tokens in store.answers(store.conversations()) if tokens[0] == number]
        count = len(told)
        assert [int(tokens[1]) for tokens in answers[:count]] == list(range(count)), "what was appended is there"
        assert count <= len(answers) <= count + 1
        assert store.append([number, 1 << 15, 2, 3], [])
        for earlier in range(number + 1):
            # The whole chain: a look-up reads a part, and other pairs of tokens may share it.
            assert on_chain(store, earlier, 1 << 15) == [2], "no chain is lost by a kill"
        kept += len(answers)
        held(opened(folder))
    assert kept > times


# Disks that are full ---------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_one_warning(tmp_path: Path, file_limit: None) -> None:
    store = opened(tmp_path)
    said = []
    with pytest.warns(RuntimeWarning, match="cannot be written .*: what it holds stays; make room, c") as caught:
        for number in range(300):
            answer = [number] * 1000
            if store.append(answer, []):
                said.append(answer)
    assert len(caught) == 1 and 50 < len(said) < 300
    assert held(store) == said
    assert found(store, 7, 7)[0] == 7


def test_a_disk_that_fills_during_a_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    assert store.append([1, 2, 3], [])
    usage = shutil.disk_usage(tmp_path)

    def fail(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    for free, said in ((0, "the disk is full, 0 MiB free"), (1 << 30, "the disk is full or failing: mdb_txn_commit:")):
        with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match=f"cannot be written .{said}"):
            patched.setattr(history_store, "put_state", fail)
            patched.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
            assert not store.append([1, 2, 4], [])
        assert store.append([9, 9], []) and held(store)[0] == [1, 2, 3]


def test_a_disk_that_is_almost_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(history_store, "ROOM_CHECK_SECONDS", 0.0)
    assert store.append([1, 2, 3], [])
    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="1 MiB free") as caught:
        patched.setattr(history_ring, "disk_usage", lambda _: usage)
        assert not store.append([1, 2, 4], [])
        assert not store.append([1, 2, 5], [])
    assert len(caught) == 1
    assert store.append([1, 2, 6], []), "there is room again"
    assert held(store) == [[1, 2, 3], [1, 2, 6]]
    assert found(store, 1, 2) == [6, 3]


@pytest.mark.parametrize("name", ["put", "put_state"])
def test_a_failure_after_the_tokens_are_written_undoes_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.append([1, 2, 3], [])

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="No space left"):
        patched.setattr(history_store, name, no_room)
        assert not store.append([1, 2, 1, 2, 1, 2, 4], [])
    assert found(store, 1, 2) == [3]
    assert store.append([5, 6, 7], [])
    assert found(store, 1, 2) == [3], "the chain leads past what was undone"
    assert held(store) == [[1, 2, 3], [5, 6, 7]]


def test_tokens_that_a_power_failure_lost_are_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(5):
        store.append([number, 2, 3], [])
    last = store.conversations()[-2:]
    for each in last:
        store._open.ring.entries[each.first : each.first + 3, 0] = 0
    del store
    assert held(opened(tmp_path)) == [[number, 2, 3] for number in range(3)]


def test_a_repair_keeps_what_another_process_appends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.append([1, 2, 3], [])
    store.append([4, 5, 6], [])
    store._open.ring.entries[store.conversations()[-1].first, TOKEN] = 0
    keep = HistoryStore.keep

    def then_kept(self: HistoryStore, *arguments: Any) -> Any:
        assert store.append([7, 8, 9], [])
        return keep(self, *arguments)

    monkeypatch.setattr(HistoryStore, "keep", then_kept)
    assert held(opened(tmp_path)) == [[1, 2, 3], [7, 8, 9]]


def test_a_store_that_is_extended_while_it_is_opened_is_not_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers beyond the end of the smaller ring aren't damaged."""
    other, answers, open_files = opened(tmp_path), NEW_STORE_POSITIONS // 1000 + 1, history_ring.open_files

    def then_extended(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(history_store, "open_files", open_files)
        files = open_files(*arguments, **options)
        assert all(other.append([number] * 1000, []) for number in range(answers))
        return files

    monkeypatch.setattr(history_store, "open_files", then_extended)
    monkeypatch.setattr(HistoryStore, "keep", no_room)
    store = opened(tmp_path)
    assert len(held(store)) == answers
    assert store.num_positions == other.num_positions > NEW_STORE_POSITIONS


def test_two_processes_create_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def then_refused(*arguments: Any) -> None:
        monkeypatch.undo()
        opened(tmp_path).append([1, 2, 3], [])
        refuse_other_files(*arguments)

    monkeypatch.setattr(history_manifest, "refuse_other_files", then_refused)
    assert held(opened(tmp_path)) == [[1, 2, 3]]


def test_conversations_evicted_during_verification_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other, listed = opened(tmp_path, max_bytes=SMALL), opened(tmp_path), HistoryStore.conversations
    for number in range(10):
        store.append([number, *range(20)], [])

    def then_evicted(self: HistoryStore) -> Any:
        monkeypatch.undo()
        found = listed(self)
        assert all(other.append([number, *range(20)], []) for number in range(10))
        return found

    monkeypatch.setattr(HistoryStore, "conversations", then_evicted)
    assert 0 < verify_conversations(store) < 10
    store._open.ring.entries[store.conversations()[-1].first % MIN_STORE_POSITIONS, TOKEN] = 99
    with pytest.raises(StoreError, match=r"is damaged \(1 of"):
        verify_conversations(store)


# Dropping and building -------------------------------------------------------------------------------


def planted_in(folder: Path) -> list[str]:
    """The files that hold a planted token in any of the ways in which tokens are written."""
    forms = [
        token.to_bytes(width, order)  # type: ignore[arg-type]
        for token in PLANTED
        for width, order in ((4, "little"), (4, "big"), (3, "big"))
    ] + [b"\xcd" + token.to_bytes(2, "big") for token in PLANTED]
    return [path.name for path in folder.iterdir() if any(form in path.read_bytes() for form in forms)]


def mixed_store(folder: Path) -> HistoryStore:
    store = opened(folder)
    for number in range(50):
        store.append([*PLANTED, number, *PLANTED], PLANTED, "secret")
        store.append([1, 2, number], [3], "public")
    return store


def test_nothing_of_a_dropped_source_is_left_in_any_file(tmp_path: Path) -> None:
    store = mixed_store(tmp_path)
    assert len(planted_in(tmp_path)) == 1
    assert [(each.source, each.tokens) for each in drop_conversations(tmp_path, source="secret")] == [
        ("secret", 7)
    ] * 50
    assert planted_in(tmp_path) == []
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())
    assert held(opened(tmp_path)) == [[1, 2, number] for number in range(50)]
    store.refresh()
    assert found(store, *PLANTED[:2]) == []


def test_old_conversations_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = opened(tmp_path), time.time()
    for days in range(10, 0, -1):
        monkeypatch.setattr(time, "time", lambda days=days: now - 86_400 * days)
        store.append([*PLANTED] if days > 5 else [days, days], [])
    monkeypatch.undo()
    assert planted_in(tmp_path)
    assert len(drop_conversations(tmp_path, older_than=timedelta(days=5.5))) == 5
    assert planted_in(tmp_path) == []
    dropped = drop_conversations(tmp_path, source=DEFAULT_SOURCE, older_than=timedelta(days=2.5))
    assert [each.tokens for each in dropped] == [2, 2, 2]
    assert held(opened(tmp_path)) == [[2, 2], [1, 1]]
    assert not drop_conversations(tmp_path, older_than=timedelta(days=5))
    with pytest.raises(StoreError, match="has no source books: it holds answers"):
        drop_conversations(tmp_path, source="books")
    with pytest.raises(StoreError, match="nothing to drop from"):
        drop_conversations(tmp_path)


def test_a_drop_that_fails_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = mixed_store(tmp_path)
    before, answers = sorted(path.name for path in tmp_path.iterdir()), held(store)
    monkeypatch.setattr(history_ring, "write_manifest", no_room)
    with pytest.raises(StoreError, match="cannot be written"):
        drop_conversations(tmp_path, source="secret")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert held(opened(tmp_path)) == answers


def test_a_drop_interrupted_after_the_manifest_was_replaced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed_store(tmp_path)

    def then_interrupted(*arguments: Any) -> None:
        write_manifest(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(history_ring, "write_manifest", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            drop_conversations(tmp_path, source="secret")
    assert planted_in(tmp_path) == []
    assert held(opened(tmp_path)) == [[1, 2, number] for number in range(50)]


def test_a_drop_does_not_bring_back_a_store_that_was_removed(tmp_path: Path) -> None:
    store = mixed_store(tmp_path)

    def rejected(each: StoredConversation) -> bool:
        if each.number == 0:
            shutil.rmtree(tmp_path)
            opened(tmp_path).append([7, 8, 9], [])
        return False

    with pytest.raises(StoreError, match="was removed or replaced by another command"):
        store.keep(rejected)
    assert held(opened(tmp_path)) == [[7, 8, 9]]


def test_a_build_takes_conversations_as_documents(tmp_path: Path) -> None:
    store = opened(tmp_path / "history")
    for number in range(20):
        store.append([1, 2, 3, 4, 5, 6, number], [], "chats")
        store.append([9, 8, 7, 6, 5, number], [], "agents")
    assert history_folders([tmp_path / "history", "more.jsonl"]) == ([tmp_path / "history"], ["more.jsonl"])
    read = HistoryDocuments([tmp_path / "history"], MARK)
    others = iter([Document([4, 3, 2, 1, 0, 1], 0)])
    sources = [*read.sources, InputFile("more.jsonl", "f" * 64)]
    manifest = build_model_store(tmp_path / "model", read.with_others(others), MARK, sources)
    assert [(Path(share.name).name, share.records) for share in manifest.sources] == [
        ("agents", 20),
        ("chats", 20),
        ("more.jsonl", 1),
    ]
    build_corpus_index(
        tmp_path / "index", [Document([1] * 9)], MARK, [InputFile("a", "0" * 64)], executor=BuildExecutor(1)
    )
    edit_store.add(tmp_path / "index", iter(read), read.sources, MARK)
    assert read_manifest(tmp_path / "index").counts["documents"] == 41
    with pytest.raises(StoreError, match="answers in another tokenizer"):
        HistoryDocuments([tmp_path / "history"], TokenizerFingerprint("more", 70_000))


def test_a_store_is_described(tmp_path: Path) -> None:
    store = mixed_store(tmp_path)
    shown = description(store)
    assert (shown["kind"], shown["model"], shown["tokens"], shown["entries"]) == ("history", MODEL, 500, 100)
    assert [(each["name"], each["share"]) for each in shown["sources"]] == [("public", 0.3), ("secret", 0.7)]
    assert shown["oldest"] <= shown["newest"] and json.dumps(shown)
    # Of the 50 matches, those at the latest places are found, as in a draft.
    assert [path for _, path, _ in continuations(store, [3, 1, 2])][:2] == [
        [50 - MAX_MATCHES],
        [51 - MAX_MATCHES],
    ]
    assert set(latency_of(store)) == {"lookup_us_p50", "lookup_us_p99"}
    assert description(opened(tmp_path / "empty"))["oldest"] is None


def test_a_store_that_is_only_read_does_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    writer = opened(folder)
    writer.append([1, 2, 3, 4], [])
    (folder / "ring-0123abcd.bin").write_bytes(b"of a command that was killed")
    before = files_of(folder)
    reader = HistoryStore.open(folder, MARK, MODEL, read_only=True)
    assert found(reader, 1, 2) == [3]
    assert not reader.append([5, 6, 7], [])
    assert answer_in_memory(History(1 << 12, store=reader), [1, 2], [8, 9, 10]), "it is matched there instead"
    assert files_of(folder) == before
    writer.append([1, 2, 5], [])
    reader.refresh()
    assert found(reader, 1, 2) == [5, 3]
    with pytest.raises(StoreError, match="holds no history store"):
        HistoryStore.open(tmp_path / "none", MARK, MODEL, read_only=True)
    assert not (tmp_path / "none").exists()


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything but LMDB's table of readers."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(LMDB_LOCK_ENDING)}


# With the answers in memory --------------------------------------------------------------------------


def answer_in_memory(history: History, prompt: list[int], tokens: list[int]) -> bool:
    """Give an answer from its start to its end; whether it is still matched in memory then."""
    lane = history.lane()
    history.start(lane, prompt, len(prompt))
    history.answers.append(lane, tokens)
    owner = int(lane["owner"][0])
    history.finish(lane)
    return bool((history.answers._owners == owner).any())


def test_a_finished_answer_moves_to_the_store(tmp_path: Path) -> None:
    history = History(1 << 12, store=opened(tmp_path))
    assert history.stored_log is not None and History(1 << 12).stored_log is None
    lane, other = history.lane(), history.lane()
    prompt, tokens = list(range(1100, 1120)), list(range(200))
    history.start(lane, prompt, 20)
    history.start(other, prompt, 20)
    for at in range(0, 200, 10):  # in blocks that alternate
        history.answers.append(lane, tokens[at : at + 10])
        history.answers.append(other, [7, 7, at])
    owner = int(lane["owner"][0])
    history.finish(lane)
    assert not (history.answers._owners == owner).any(), "it is not matched twice"
    assert lane["owner"][0] == 0
    assert history.store and held(history.store) == [tokens]
    assert history.store.conversations()[0].before == OVERLAP_TOKENS
    assert found(history.store, 1118, 1119) == [0]
    history.start(other, prompt, 20)  # ends the answer before it
    assert len(held(history.store)) == 2
    history.finish(other)
    assert len(held(history.store)) == 2, "an empty answer is none"


def test_prompts_are_stored_if_they_are_learned(tmp_path: Path) -> None:
    history = History(1 << 12, prompts=True, store=opened(tmp_path))
    history.source = "chats"
    lane = history.lane()
    history.start(lane, [1, 2, 3, 4, 5], 4)
    history.answers.append(lane, [6, 7])
    history.finish(lane)
    assert history.store and held(history.store) == [[4, 5, 6, 7]]
    assert history.store.conversations()[0].source == "chats"


def test_an_answer_that_cannot_be_stored_stays_in_memory(tmp_path: Path) -> None:
    history = History(1 << 12, store=opened(tmp_path / "store"))
    shutil.rmtree(tmp_path / "store")
    with pytest.warns(RuntimeWarning, match="is not kept on the disk"):
        assert answer_in_memory(history, [1, 2], [3, 4, 5])
