"""Stores among other files, stores that are replaced while they are opened, and stores that are damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from hdtool.builders.stores import edit_store as rework
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.cli.inspect import inspect
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores import store_file_names, store_folder
from hdtool.data.stores.kinds import BUILT_KINDS
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import building, damaged_files, read_manifest
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores import inspect_store as runtime_stores, suffix_search as suffixes
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.inspect_store import continuations, latency_of
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.model_store_lmdb import ModelRecord
from hdtool.runtime.stores.store_set import store_of

VOCABULARY = 20
MARK = TokenizerFingerprint("test", VOCABULARY)
KINDS = list(BUILT_KINDS)
BUILDS = {"corpus": "hdtool build-corpus-db", "model": "hdtool build-model-db"}
FOREIGN = {
    "thesis.tex": b"years of work",
    "photo.jpg": bytes(range(256)),
    "heads-0123ABCD.bin": b"upper case",
    "heads-0123abcd.txt": b"another ending",
    "heads-0123abcde.bin": b"nine digits",
    "notes-0123abcd.bin": b"another part",
    "manifest.json-backup": b"{}",
    "0123abcd.bin": b"",
}
WEB_APP = b'{"name": "A web app", "start_url": ".", "icons": []}'


def build(kind: str, folder: Path, number: int = 0) -> Manifest:
    """A store of two sources; its documents begin with ``number``."""
    documents = [Document([number, *range(1 + source, 9 + source)], source) for source in (0, 0, 1)]
    sources = [InputFile("in/first.txt", "a" * 64), InputFile(f"in/{number}.txt", f"{number:064x}")]
    if kind == "model":
        return build_model_store(folder, documents, MARK, sources)
    return build_corpus_index(folder, documents, MARK, sources, executor=BuildExecutor(1))


def contents(folder: Path) -> dict[str, object]:
    """All files of a folder with their bytes, and links with their targets."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in folder.iterdir()
    }


def litter(folder: Path) -> dict[str, object]:
    """Files of other origin, with names like those of a store, links and folders among them."""
    folder.mkdir(exist_ok=True)
    before = contents(folder)
    for name, content in FOREIGN.items():
        (folder / name).write_bytes(content)
    (folder / "keys-0123abcd.bin").mkdir()
    target = folder.parent / "elsewhere.bin"
    target.write_bytes(b"elsewhere")
    (folder / "rows-0123abcd.bin").symlink_to(target)
    (folder / "manifest.json-0123abcd").symlink_to(target)
    return {name: content for name, content in contents(folder).items() if name not in before}


# Files of other origin ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FOREIGN, MANIFEST])
def test_a_folder_of_other_files_is_refused_untouched(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WEB_APP)
    with pytest.raises(StoreError, match=f"{tmp_path} holds no store, but other files, such as {name}: choose"):
        build(kind, tmp_path)
    assert contents(tmp_path) == {name: WEB_APP}


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_beside_a_store_stay(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    build(kind, folder)
    foreign = litter(folder)
    build(kind, tmp_path / "other", 2)
    commands: list[Callable[[], object]] = [
        lambda: build(kind, folder, 1),
        lambda: rework.add(folder, [Document([7] * 9)], [InputFile("new.txt", "f" * 64)], MARK),
        lambda: rework.drop(folder, "first.txt"),
        lambda: rework.merge([folder, tmp_path / "other"], folder),
    ]
    for command in commands:
        command()
        found, manifest = contents(folder), read_manifest(folder)
        own = {MANIFEST, ".lock", *(file.name for file in manifest.files.values())}
        assert {name: found[name] for name in foreign} == foreign
        assert found.keys() == foreign.keys() | own, "nothing of the old store is left"
    with pytest.raises(ZeroDivisionError), building(folder) as failing:
        failing.path("heads").write_bytes(b"half")
        _ = 1 / 0
    assert contents(folder) == found
    assert (tmp_path / "elsewhere.bin").read_bytes() == b"elsewhere"


@pytest.mark.parametrize("kind", KINDS)
def test_leftovers_of_a_killed_first_build_do_not_block_the_next(kind: str, tmp_path: Path) -> None:
    for name in (
        ".lock",
        "documents-0123abcd.bin",
        "record-0123abcd.mdb",
        "manifest.json-0123abcd",
    ):
        (tmp_path / name).write_bytes(b"" if name == ".lock" else b"half")
    manifest = build(kind, tmp_path)
    assert contents(tmp_path).keys() == {MANIFEST, ".lock", *(file.name for file in manifest.files.values())}


DAMAGED = {"kind": 1, "counts": {}, "options": {}, "sources": 1, "files": []}


UNREADABLE = (b"{", b"\xff", b"[" * 100_000, json.dumps(DAMAGED).encode(), b'{"kind": "corpus", "format": 99}')


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_damaged_manifest_beside_its_files_does_not_block_a_build(content: bytes, tmp_path: Path) -> None:
    old = build("corpus", tmp_path)
    (tmp_path / MANIFEST).write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(StoreError):
        read_manifest(tmp_path)
    with pytest.raises(ZeroDivisionError), building(tmp_path):
        _ = 1 / 0
    assert contents(tmp_path) == before, "nothing is lost by a build that fails"
    new = build("corpus", tmp_path)
    assert read_manifest(tmp_path) == new and damaged_files(tmp_path, new) == []
    assert not {file.name for file in old.files.values()} & contents(tmp_path).keys()


def test_a_link_to_a_folder_is_a_destination_and_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder")
    for number in range(2):
        manifest = build("corpus", link, number)
        assert link.is_symlink() and read_manifest(tmp_path / "folder") == manifest


@pytest.mark.parametrize(
    ("target", "said"),
    [("file", "is a file, a folder is needed"), ("none", "is a link to a place that does not exist")],
)
def test_a_link_to_anything_else_is_refused(target: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(StoreError, match=said):
        build("corpus", tmp_path / "link")
    with pytest.raises(StoreError, match="cannot be written"):
        build("corpus", tmp_path / "file" / "store")
    assert contents(tmp_path) == {"file": b"text", "link": str(tmp_path / target)}


def test_a_link_in_place_of_the_manifest_is_not_replaced(tmp_path: Path) -> None:
    build("corpus", tmp_path / "store")
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / MANIFEST).symlink_to(tmp_path / "store" / MANIFEST)
    before = contents(tmp_path / "store")
    with pytest.raises(StoreError, match=f"such as {MANIFEST}"):
        build("corpus", tmp_path / "view")
    assert contents(tmp_path / "store") == before and (tmp_path / "view" / MANIFEST).is_symlink()


@pytest.mark.parametrize("linked", [False, True])
def test_a_lock_file_of_another_program_is_neither_truncated_nor_followed(linked: bool, tmp_path: Path) -> None:
    folder, other = tmp_path / "store", tmp_path / "other.lock"
    build("corpus", folder)
    (folder / ".lock").unlink()
    other.write_text("mine")
    if linked:
        (folder / ".lock").symlink_to(other)
    else:
        (folder / ".lock").write_text("mine")
    before = contents(folder)
    with pytest.raises(StoreError, match=r"\.lock .*so it is not a lock file of hdtool"):
        build("corpus", folder, 1)
    assert contents(folder) == before and other.read_text() == "mine"


def test_parts_are_created_and_never_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("corpus", tmp_path / "store")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0123abcd")
    (tmp_path / "other").write_text("mine")
    (tmp_path / "store" / "documents-0123abcd.bin").symlink_to(tmp_path / "other")
    with pytest.raises(StoreError, match="cannot be written"):
        build("corpus", tmp_path / "store", 1)
    assert (tmp_path / "other").read_text() == "mine"
    assert read_manifest(tmp_path / "store").sources[1].name == "in/0.txt"
    with pytest.raises(ValueError, match="a store has no part thesis"), building(tmp_path / "new") as started:
        started.path("thesis")


def test_a_manifest_of_another_program_that_appears_during_a_build_stays(tmp_path: Path) -> None:
    def documents() -> Iterator[Document]:
        yield Document([1, 2, 3])
        (tmp_path / MANIFEST).write_bytes(WEB_APP)

    with pytest.raises(StoreError, match="was written by another program meanwhile"):
        build_corpus_index(tmp_path, documents(), MARK, [InputFile("a", "0")], executor=BuildExecutor(1))
    assert (tmp_path / MANIFEST).read_bytes() == WEB_APP


def test_names_that_are_no_text_are_recorded_escaped(tmp_path: Path) -> None:
    sources = [InputFile("in/\udcff.txt", "0"), InputFile("in/b.txt", "1")]
    documents = [Document([1, 2, 3], 0), Document([3, 2, 1], 1)]
    written = build_corpus_index(tmp_path, documents, MARK, sources, executor=BuildExecutor(1))
    assert read_manifest(tmp_path) == written
    assert written.sources[0].name == "in/\\udcff.txt"
    assert [share.name for share in rework.drop(tmp_path, "in/\udcff.txt").removed] == ["in/\\udcff.txt"]


# Stores that are replaced ---------------------------------------------------------------------------


def inspected(folder: Path) -> None:
    inspect(folder, verify=True, latency=True, config=ModelConfig())


READERS: dict[str, Callable[[Path], object]] = {
    "read": read_manifest,
    "inspect": inspected,
    "rework": lambda folder: list(rework.StoreContents.of(folder).documents()),
}
OPENED: dict[str, Callable[[Path], object]] = {"corpus": CorpusIndex, "model": ModelStore}


STEPS: dict[str, tuple[Any, str]] = {
    "sizes": (store_folder, "_check_size"),
    "map": (np, "memmap"),
    "documents": (rework, "_texts"),
    "checksums": (store_folder, "_stream_of"),
}


@pytest.mark.parametrize(
    ("reader", "step"),
    [
        ("read", "sizes"),
        ("open", "sizes"),
        ("open", "map"),
        ("rework", "sizes"),
        ("rework", "documents"),
        ("inspect", "sizes"),
        ("inspect", "map"),
        ("inspect", "checksums"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_replaced_while_it_is_opened_is_opened_anew(
    kind: str, reader: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds finish between the reading of the manifest and that of the files, at each of the steps."""
    monkeypatch.setattr(runtime_stores, "TIMED_LOOKUPS", 5)
    folder = tmp_path / "store"
    build(kind, folder)
    build("model", tmp_path / "next", 1)  # compiled before
    module, name = STEPS[step]
    done, left = getattr(module, name), [3, 2, 1]

    def replaced(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, name, done)
        build(kind, folder, left.pop())
        if left:
            monkeypatch.setattr(module, name, replaced)
        return done(*arguments, **options)

    monkeypatch.setattr(module, name, replaced)
    (READERS | {"open": OPENED[kind]})[reader](folder)
    assert not left, "each opening met another build"
    assert damaged_files(folder, read_manifest(folder)) == []


def test_a_missing_file_of_an_unchanged_store_is_an_error_at_once(tmp_path: Path) -> None:
    manifest = build("model", tmp_path)
    (tmp_path / manifest.files["rows"].name).unlink()
    with pytest.raises(StoreError, match=rf"rows-\w+\.bin is missing: build the store again with {BUILDS['model']}$"):
        ModelStore(tmp_path)


def test_a_store_that_is_replaced_without_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("corpus", tmp_path)

    def always_replaced(manifest: Manifest) -> None:
        build("corpus", tmp_path, manifest.bytes)
        raise StoreError("is missing")

    with pytest.raises(StoreError, match=f"was replaced {store_folder.MAX_OPEN_ATTEMPTS} times while it was opened"):
        store_folder.read_store(tmp_path, always_replaced)


def build_without_pause(kind: str, folder: str, stop: Any) -> None:
    number = 0
    while not stop.is_set():
        build(kind, Path(folder), number := (number + 1) % 1000)


@pytest.mark.long
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS[1:])])
def test_a_process_builds_while_another_opens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the moment: a store that was opened holds the documents of one build."""
    monkeypatch.setattr(store_folder, "MAX_OPEN_ATTEMPTS", 1000)
    build(kind, tmp_path)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    builder = context.Process(target=build_without_pause, args=(kind, str(tmp_path), stop))
    builder.start()
    try:
        seen: set[str] = set()
        while len(seen) < 15:
            assert builder.is_alive()
            opened = OPENED[kind](tmp_path)
            assert isinstance(opened, CorpusIndex | ModelStore)
            contents = rework.StoreContents.of(tmp_path)
            numbers = [int(document.ids[0]) for document in contents.documents()]
            assert contents.manifest.sources[1].name == f"in/{numbers[0]}.txt"
            seen.add(opened.manifest.files["heads"].name)
    finally:
        stop.set()
        builder.join()
    assert builder.exitcode == 0


# Damaged and hostile stores -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind = str(request.param)
    folder = tmp_path_factory.mktemp("whole") / kind
    build(kind, folder)
    return kind, folder


def copied(whole: tuple[str, Path], tmp_path: Path) -> tuple[str, Path, dict[str, Any]]:
    shutil.copytree(whole[1], tmp_path / "store")
    return whole[0], tmp_path / "store", json.loads((tmp_path / "store" / MANIFEST).read_text())


def write(folder: Path, row: object) -> None:
    (folder / MANIFEST).write_text(json.dumps(row))


def changes(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Manifests that are none, each with what an error has to name."""

    def changed(*path: Any, to: Any) -> dict[str, Any]:
        copy: dict[str, Any] = json.loads(json.dumps(row))
        place: Any = copy
        for step in path[:-1]:
            place = place[step]
        if to is None:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        return copy

    for name in ("../outside.bin", "slots-0123abcd.bin/../x", "heads.bin", "heads-0123abcd.bin\n", "", "\x00"):
        yield "is no file name of the part heads", changed("files", "heads", "name", to=name)
    yield (
        "is no file name of the part heads",
        changed("files", "heads", "name", to="rows-0123abcd.bin"),
    )
    yield "heads is missing", changed("files", "heads", to=None)
    yield "unknown", changed("files", "thesis", to=row["files"]["heads"])
    value: Any
    for value in (-1, 0, True, "many", 1.5, 2**31, 10**400, [], {}):
        yield "vocab_size", changed("tokenizer", "vocab_size", to=value)
    for value in (-1, 0, True, "1", 2**63, 1e9):
        yield "bytes", changed("files", "heads", "bytes", to=value)
    for value in (-1, False, "3", 10**30):
        yield "tokens", changed("counts", "tokens", to=value)
        yield "records", changed("sources", 0, "records", to=value)
    yield "tokens is missing", changed("counts", "tokens", to=None)
    yield "sum over its sources", changed("sources", 0, "records", to=3)
    yield "sum over its sources", changed("sources", 0, "tokens", to=3)
    yield "holds no object", changed("sources", 0, to="in/first.txt")
    yield "sources is not a list", changed("sources", to={})
    yield "is not valid Unicode", changed("sources", 0, "name", to="\ud800")
    yield "kind is none of", changed("kind", to="thesis")
    yield "token_bytes", changed("options", "token_bytes", to="two")
    yield "is not a single value", changed("options", "other", to=[1])
    yield "is no name of a field", changed("counts", "a\nb", to=1)
    advice = f"this hdtool reads format {row['format']}: build it again with {BUILDS[row['kind']]}"
    for value in (True, 1.0, [1], "1", 99):
        yield f"of format {value!a}, {advice}", changed("format", to=value)


def test_manifests_that_are_damaged_are_named_in_one_line(whole: tuple[str, Path], tmp_path: Path) -> None:
    _, folder, row = copied(whole, tmp_path)
    for said, changed in changes(row):
        write(folder, changed)
        with pytest.raises(StoreError) as error:
            read_manifest(folder)
        assert said in str(error.value) and "\n" not in str(error.value), (said, str(error.value))
    for text in ("[]", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "", "\x00"):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(StoreError):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(StoreError, match="is not a file"):
        read_manifest(folder)


@pytest.mark.parametrize(("place", "value"), [("TOKENS", 0), ("SUFFIXES", 99), ("SUFFIX", -1), ("PREFIX", 2**62)])
def test_a_shard_that_does_not_fit_is_an_error(place: str, value: int, tmp_path: Path) -> None:
    path = tmp_path / build("corpus", tmp_path).files["shards"].name
    shards = np.fromfile(path, np.int64)
    shards[getattr(suffixes, place)] = value
    shards.tofile(path)
    with pytest.raises(StoreError, match="its shards do not fit its files"):
        CorpusIndex(tmp_path)


@pytest.mark.parametrize("part", sorted(store_file_names.PART_ENDINGS))
def test_a_part_that_is_empty_or_no_whole_rows_is_an_error(part: str, whole: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder, row = copied(whole, tmp_path)
    if part not in BUILT_KINDS[kind].parts or part == "record":  # which lookups do not open
        pytest.skip("another kind of store")
    path = folder / row["files"][part]["name"]
    content = path.read_bytes()
    for size in (0, 1, len(content) - 1, len(content) + 1):
        path.write_bytes((content * 2)[:size])
        said = f"has {size:,} bytes instead of {len(content):,}: build the store again with {BUILDS[kind]}$"
        with pytest.raises(StoreError, match=said):
            OPENED[kind](folder)
        row["files"][part]["bytes"] = size
        write(folder, row)
        with pytest.raises(StoreError):
            OPENED[kind](folder)
        row["files"][part]["bytes"] = len(content)
        write(folder, row)
    path.write_bytes(content)
    OPENED[kind](folder)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../outside.bin", "corpus", "model", "\ud800", "\x1b[2J\n", [], {}, [[]], 10**300]),
)


def places(row: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON object."""
    for key in row if isinstance(row, dict) else range(len(row)) if isinstance(row, list) else ():
        yield (*path, key)
        yield from places(row[key], (*path, key))


def spoil_manifest(row: dict[str, Any], data: st.DataObject) -> None:
    *path, last = data.draw(st.sampled_from(list(places(row))))
    place: Any = row
    for step in path:
        place = place[step]
    if data.draw(st.integers(0, 4)):
        place[last] = data.draw(values)
    else:
        del place[last]


def spoil_file(folder: Path, row: dict[str, Any], data: st.DataObject) -> None:
    """Another size, other bytes or other numbers, which the manifest may vouch for."""
    file = row["files"][data.draw(st.sampled_from(sorted(row["files"])))]
    path = folder / file["name"]
    content = bytearray(path.read_bytes())
    match data.draw(st.integers(0, 3)):
        case 0:
            content = (content * 3)[: data.draw(st.integers(0, 3 * len(content)))]
        case 1:
            for _ in range(data.draw(st.integers(1, 20)) if content else 0):
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        case 2:
            numbers = np.frombuffer(content[: len(content) // 4 * 4], np.int32).copy()
            for _ in range(data.draw(st.integers(1, 6))):
                place = data.draw(st.integers(0, max(0, len(numbers) - 1)))
                numbers[place : place + 1] = data.draw(st.integers(-(2**31), 2**31 - 1))
            content = bytearray(numbers.tobytes())
        case 3:
            number = data.draw(st.sampled_from([0, -1, 2**62, 2**31 - 1, 1]))
            content = bytearray(np.full(max(1, len(content) // 8), number, np.int64).tobytes())
    path.write_bytes(content)
    if data.draw(st.booleans()):
        file["bytes"] = len(content)


def use(folder: Path) -> None:
    """Whatever a user does with a store that it did not build."""
    manifest = read_manifest(folder)
    json.dumps(manifest.options)
    damaged_files(folder, manifest)
    store = store_folder.read_store(folder, lambda found: store_of(folder, found))
    for context in ([], [5], [1, 2, 3, 4], [2**40, -1], [VOCABULARY], [6, 7, 8, VOCABULARY + 1]):
        for _, path, _ in continuations(store, context):
            assert all(0 <= token < manifest.tokenizer.vocab_size for token in path)
    latency_of(store)
    if manifest.kind == "model":
        list(ModelRecord.of(folder, manifest).ngrams())
    inspect(folder, verify=False, latency=True, config=ModelConfig())
    list(rework.StoreContents.of(folder).documents())


@pytest.mark.parametrize("examples", [25, pytest.param(150, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("files", [False, True])
def test_a_hostile_store_works_or_is_refused(
    files: bool,
    examples: int,
    whole: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_stores, "TIMED_LOOKUPS", 5)
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    outcomes = set()

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        _, folder, row = copied(whole, tmp_path_factory.mktemp("hostile"))
        for _ in range(data.draw(st.integers(0, 3))):
            if files:
                spoil_file(folder, row, data)
            else:
                spoil_manifest(row, data)
        write(folder, row)
        try:
            use(folder)
            outcomes.add("works")
        except StoreError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.add("refused")

    check()
    assert outcomes == {"works", "refused"}, "the test must reach both"


@settings(max_examples=50)
@given(content=st.binary(max_size=60))
def test_any_bytes_in_place_of_a_manifest_are_an_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(StoreError):
        read_manifest(folder)
    with pytest.raises(StoreError, match="holds no store, but other files"):
        build("corpus", folder)
    assert contents(folder) == {MANIFEST: content}
