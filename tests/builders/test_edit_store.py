"""Stores made from stores are the stores that a build from the same texts gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hdtool.builders.stores import edit_store as rework
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores import store_file_names
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import LOCK_FILE, MANIFEST
from hdtool.data.stores.store_folder import read_manifest

MARK = TokenizerFingerprint("test", 20)
BUILDS: dict[str, Callable[..., Manifest]] = {"corpus": build_corpus_index, "model": build_model_store}
Texts = list[list[list[int]]]
"""Sources of documents of tokens."""

texts = st.lists(
    st.lists(st.lists(st.integers(0, 19), min_size=5, max_size=12), min_size=1, max_size=4), min_size=2, max_size=4
)


def build(kind: str, folder: Path, sources: Texts, first: int = 0) -> Manifest:
    documents = [Document(ids, number) for number, source in enumerate(sources) for ids in source]
    names = [InputFile(f"in/{number + first}.txt", f"hash {number + first}") for number in range(len(sources))]
    return BUILDS[kind](folder, documents, MARK, names)


def parts(manifest: Manifest) -> object:
    """What two equal stores share; LMDB lays its pages out as it likes."""
    hashes = {part: file.sha256 for part, file in manifest.files.items() if part != "record"}
    return manifest.sources, manifest.counts, manifest.options, hashes


@pytest.mark.parametrize("examples", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", BUILDS)
def test_merging_and_dropping_equal_building(
    kind: str, examples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=examples)
    @given(texts, st.data())
    def check(sources: Texts, data: st.DataObject) -> None:
        root = tmp_path_factory.mktemp("rework")
        whole = build(kind, root / "whole", sources)
        cut = data.draw(st.integers(1, len(sources) - 1))
        build(kind, root / "a", sources[:cut])
        build(kind, root / "b", sources[cut:], first=cut)
        assert parts(rework.merge([root / "a", root / "b"], root / "ab")) == parts(whole)
        assert parts(rework.merge([root / "whole", root / "a"], root / "again")) == parts(whole)
        assert parts(rework.merge([root / "a", root / "b"], root / "a")) == parts(whole)
        without = data.draw(st.integers(0, len(sources) - 1))
        rework.drop(root / "whole", f"{without}.txt")
        kept = build(kind, root / "kept", [source for number, source in enumerate(sources) if number != without])
        assert parts(read_manifest(root / "whole"))[3] == parts(kept)[3]  # type: ignore[index]

    check()


@pytest.mark.parametrize("kind", BUILDS)
def test_adding_equals_building(kind: str, tmp_path: Path) -> None:
    sources: Texts = [[[1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1], [1, 2, 3, 4, 5]], [[7] * 9]]
    whole = build(kind, tmp_path / "whole", sources)
    build(kind, tmp_path / "grown", sources[:1])
    new = [Document(ids, number) for number, source in enumerate(sources[1:]) for ids in source]
    names = [InputFile("in/1.txt", "hash 1"), InputFile("in/2.txt", "hash 2")]
    assert parts(rework.add(tmp_path / "grown", new, names, MARK)) == parts(whole)
    with pytest.raises(StoreError, match=r"in/2.txt is in .* already, as in/2.txt"):
        rework.add(tmp_path / "grown", new, names[1:], MARK)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    sources: Texts = [[[1, 2, 3, 4, 5]]]
    build("corpus", tmp_path / "corpus", sources)
    build("model", tmp_path / "model", sources)
    with pytest.raises(StoreError, match="is a model store, a corpus store is needed"):
        rework.merge([tmp_path / "corpus", tmp_path / "model"], tmp_path / "out")
    with pytest.raises(StoreError, match=r"has no source nothing: it holds in/0\.txt \(sha256 hash 0\)"):
        rework.drop(tmp_path / "corpus", "nothing")
    with pytest.raises(StoreError, match=r"is all that .* holds"):
        rework.drop(tmp_path / "corpus", "in/0.txt")
    with pytest.raises(StoreError, match="another tokenizer"):
        rework.add(tmp_path / "corpus", [], [], TokenizerFingerprint("other", 20))
    assert not (tmp_path / "out").exists()


def store_of(folder: Path, *sources: tuple[str, str]) -> Path:
    """A corpus index of sources with these names and hashes, a document each."""
    documents = [Document([number, 1, 2, 3, 4], number) for number in range(len(sources))]
    build_corpus_index(folder, documents, MARK, [InputFile(name, sha256 * 64) for name, sha256 in sources])
    return folder


def names_after(folder: Path, name: str) -> list[str]:
    """The names and hashes that are left when a source is dropped; the documents are those of the sources left."""
    before = read_manifest(folder).sources
    dropped = rework.drop(folder, name)
    assert [share for share in before if share not in dropped.removed] == list(dropped.manifest.sources)
    return [f"{share.name}:{share.sha256[0]}" for share in dropped.manifest.sources]


def test_an_exact_name_goes_before_a_file_name(tmp_path: Path) -> None:
    store = store_of(tmp_path, ("x.txt", "a"), ("one/x.txt", "b"), ("two/x.txt", "c"))
    assert names_after(store, "x.txt") == ["one/x.txt:b", "two/x.txt:c"]
    assert names_after(store, "one/x.txt") == ["two/x.txt:c"]


def test_a_file_name_that_several_sources_have_selects_none(tmp_path: Path) -> None:
    store = store_of(tmp_path, ("one/x.txt", "b"), ("two/x.txt", "c"), ("two/y.txt", "d"))
    before = read_manifest(store)
    listed = r"one/x\.txt \(sha256 b{12}\), two/x\.txt \(sha256 c{12}\): name one by its whole path or by its hash"
    with pytest.raises(StoreError, match=rf"has several sources x\.txt: {listed}"):
        rework.drop(store, "x.txt")
    assert read_manifest(store) == before
    assert names_after(store, "y.txt") == ["one/x.txt:b", "two/x.txt:c"]


def test_a_hash_selects_one_of_equal_names(tmp_path: Path) -> None:
    store = store_of(tmp_path, ("x.txt", "b"), ("x.txt", "c"), ("y.txt", "d"))
    with pytest.raises(StoreError, match=r"x\.txt \(sha256 b{12}\), x\.txt \(sha256 c{12}\): name one by its hash"):
        rework.drop(store, "x.txt")
    with pytest.raises(StoreError, match="has no source ccccccc:"):
        rework.drop(store, "c" * 7)
    assert names_after(store, "C" * 8) == ["x.txt:b", "y.txt:d"]
    assert names_after(store, "d" * 64) == ["x.txt:b"]


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("command", ["add", "drop", "merge"])
def test_a_store_that_is_replaced_before_the_lock_keeps_what_it_got(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command finishes between the reading of the old manifest and the lock."""
    sources: Texts = [[[1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1]]]
    build(kind, tmp_path, sources)
    read = rework.StoreContents.of

    def of(folder: Path) -> rework.StoreContents:
        contents = read(folder)
        build(kind, folder, [*sources, [[9, 8, 7, 6, 5]]])
        assert sum(1 for _ in contents.documents()) == 2, "what was mapped stays"
        return contents

    monkeypatch.setattr(rework.StoreContents, "of", of)
    commands: dict[str, Callable[[], object]] = {
        "add": lambda: rework.add(tmp_path, [Document([7] * 5)], [InputFile("new", "n")], MARK),
        "drop": lambda: rework.drop(tmp_path, "0.txt"),
        "merge": lambda: rework.merge([tmp_path], tmp_path),
    }
    with pytest.raises(StoreError, match="was replaced by another command meanwhile: run this one again"):
        commands[command]()
    assert [share.name for share in read_manifest(tmp_path).sources] == ["in/0.txt", "in/1.txt", "in/2.txt"]


@pytest.mark.parametrize("kind", BUILDS)
def test_a_drop_that_was_killed_before_it_deleted_is_completed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(kind, tmp_path, [[[1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1]]])
    with monkeypatch.context() as patched:
        patched.setattr(store_file_names, "delete_leftovers", lambda *_: None)  # as if killed
        manifest = rework.drop(tmp_path, "0.txt").manifest
    whole = {file.name for file in manifest.files.values()} | {MANIFEST, LOCK_FILE}
    assert {path.name for path in tmp_path.iterdir()} > whole
    with pytest.raises(StoreError, match=r"has no source 0\.txt"):
        rework.drop(tmp_path, "0.txt")
    assert {path.name for path in tmp_path.iterdir()} == whole
    assert read_manifest(tmp_path) == manifest


def test_a_drop_creates_nothing_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        rework.drop(tmp_path / "none", "0.txt")
    assert not list(tmp_path.iterdir())


def test_damaged_documents_are_refused(tmp_path: Path) -> None:
    """Their tokens are indices in a build; the store stays as it is."""
    manifest = build("corpus", tmp_path, [[[1, 2, 3, 4, 5]], [[5, 4, 3, 2, 1]]])
    path = tmp_path / manifest.files["documents"].name
    whole = np.fromfile(path, np.uint16)
    for place, token, said in (
        (0, 60_000, "token 60,000"),
        (11, 3, "has no end"),
        (2, 20, "more documents than"),
        (5, 3, "fewer documents than"),
    ):
        spoiled = whole.copy()
        spoiled[place] = token
        spoiled.tofile(path)
        with pytest.raises(StoreError, match=said):
            rework.drop(tmp_path, "0.txt")
    assert read_manifest(tmp_path) == manifest
