"""Stores made from stores are the stores that a build from the same texts gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdtool.builders import rework
from hdtool.builders.corpus_index import build_corpus_index
from hdtool.builders.model_store import build_model_store
from hdtool.data.documents import Document, Source
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, TokenizerMark, read_manifest

MARK = TokenizerMark("test", 20)
BUILDS: dict[str, Callable[..., Manifest]] = {"corpus": build_corpus_index, "model": build_model_store}
Texts = list[list[list[int]]]
"""Sources of documents of tokens."""

texts = st.lists(
    st.lists(st.lists(st.integers(0, 19), min_size=5, max_size=12), min_size=1, max_size=4), min_size=2, max_size=4
)


def build(kind: str, folder: Path, sources: Texts, first: int = 0) -> Manifest:
    documents = [Document(ids, number) for number, source in enumerate(sources) for ids in source]
    names = [Source(f"in/{number + first}.txt", f"hash {number + first}") for number in range(len(sources))]
    return BUILDS[kind](folder, documents, MARK, names)


def parts(manifest: Manifest) -> object:
    """What two equal stores share; LMDB lays its pages out as it likes."""
    hashes = {part: file.sha256 for part, file in manifest.files.items() if part != "entries"}
    return manifest.sources, manifest.counts, manifest.options, hashes


@pytest.mark.parametrize("kind", BUILDS)
def test_merging_and_dropping_equal_building(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=20)
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
    names = [Source("in/1.txt", "hash 1"), Source("in/2.txt", "hash 2")]
    assert parts(rework.add(tmp_path / "grown", new, names, MARK)) == parts(whole)
    with pytest.raises(StoreError, match=r"in/2.txt is in .* already, as in/2.txt"):
        rework.add(tmp_path / "grown", new, names[1:], MARK)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    sources: Texts = [[[1, 2, 3, 4, 5]]]
    build("corpus", tmp_path / "corpus", sources)
    build("model", tmp_path / "model", sources)
    with pytest.raises(StoreError, match="is a model store, a corpus store is needed"):
        rework.merge([tmp_path / "corpus", tmp_path / "model"], tmp_path / "out")
    with pytest.raises(StoreError, match=r"has no source nothing: it holds in/0\.txt"):
        rework.drop(tmp_path / "corpus", "nothing")
    with pytest.raises(StoreError, match=r"is all that .* holds"):
        rework.drop(tmp_path / "corpus", "in/0.txt")
    with pytest.raises(StoreError, match="another tokenizer"):
        rework.add(tmp_path / "corpus", [], [], TokenizerMark("other", 20))
    assert not (tmp_path / "out").exists()
