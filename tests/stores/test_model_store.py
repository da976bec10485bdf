"""The model store against a brute-force counting of the documents."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hdtool.builders.stores import frequent_sequences as counting, local_executor
from hdtool.builders.stores.build_stores import MAX_DOUBLINGS, _hash_table, build_model_store
from hdtool.builders.stores.frequent_sequences import table_size
from hdtool.data.documents import Document, InputFile, token_type
from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import damaged_files, file_checksum
from hdtool.runtime.stores.lmdb_files import LEAF_PAGE, PAGE_HEADER_BYTES
from hdtool.runtime.stores.model_store import (
    KEY_TOTAL,
    KEY_WIDTH,
    MAX_PROBES,
    MODEL_RECORD,
    ModelStore,
    find_key,
    lookup_hash,
    mix_hash,
    slot_of,
    split_hash,
)
from hdtool.runtime.stores.model_store_lmdb import MAX_PREFIX_TOKENS, PHRASE_TOKENS, ModelRecord
from tests.support.stores import build

Documents = list[list[int]]
Sequences = Counter[tuple[int, ...]]
Rows = list[tuple[tuple[int, ...], int]]
Found = dict[int, tuple[int, int, Rows]]
"""By the length of the prefix: its total, how many different tokens follow, and those kept with their counts."""

VOCABULARIES = [4, 65_535, 65_536, 200_000]
FLAT = ["slots", "keys", "rows", "heads", "phrases"]


def sequences(documents: Documents, length: int) -> Sequences:
    """How many documents hold each sequence of a length."""
    return Counter(
        inside for ids in documents for inside in {tuple(ids[at : at + length]) for at in range(len(ids) - length + 1)}
    )


class Oracle:
    """What a store of these documents should answer, by counting without any cleverness."""

    def __init__(self, documents: Documents, *, top_k: int, per_key: int) -> None:
        self.per_key = per_key
        self.all = [sequences(documents, length) for length in range(2, MAX_PREFIX_TOKENS + 2)]
        self.kept = [dict(sorted(all.items(), key=lambda item: (-item[1], item[0]))[:top_k]) for all in self.all]

    def after(self, context: list[int]) -> Found:
        found: Found = {}
        for prefix in range(min(len(context), MAX_PREFIX_TOKENS), 0, -1):
            tail = tuple(context[-prefix:])
            rows = self.rows(self.kept[prefix - 1], tail)
            follows = [count for ids, count in self.all[prefix - 1].items() if ids[:prefix] == tail]
            if rows:
                found[prefix] = sum(follows), len(follows), rows[: self.per_key]
        return found

    def phrases(self, token: int) -> Rows:
        return self.rows(self.kept[PHRASE_TOKENS - 1], (token,))[: self.per_key]

    def rows(self, kept: dict[tuple[int, ...], int], head: tuple[int, ...]) -> Rows:
        return [(ids[len(head) :], count) for ids, count in kept.items() if ids[: len(head)] == head]

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        return {ids[:prefix] for prefix, kept in enumerate(self.kept, 1) for ids in kept}


def found_by(store: ModelStore, context: Any) -> Found:
    entries = store.after(context)
    assert [entry.length for entry in entries] == sorted((entry.length for entry in entries), reverse=True)
    return {
        length: (
            total,
            distinct,
            [((token,), count) for token, count in zip(tokens.tolist(), counts.tolist(), strict=True)],
        )
        for length, total, distinct, tokens, counts in entries
    }


def phrases_of(store: ModelStore, token: int) -> Rows:
    return [(tuple(ids), count) for ids, count in zip(*map(np.ndarray.tolist, store.phrases_after(token)), strict=True)]


def ngrams_in(store: ModelStore) -> tuple[dict[tuple[int, ...], tuple[int, int, Rows]], dict[int, Rows]]:
    """The n-grams of the record, read without hdtool: prefixes, and phrases."""
    path = store.folder / store.manifest.files["record"].name
    prefixes: dict[tuple[int, ...], tuple[int, int, Rows]] = {}
    phrases: dict[int, Rows] = {}
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment, environment.begin() as read:
        for key, value in read.cursor():
            if not key[0]:
                continue
            tokens = tuple(np.frombuffer(key[1:], ">u4").tolist())
            total, distinct, followers, counts = msgpack.unpackb(value)
            wide = token_type(store.vocabulary).newbyteorder("<")
            followers = np.frombuffer(followers, wide).reshape(-1, PHRASE_TOKENS if key[0] > MAX_PREFIX_TOKENS else 1)
            rows = list(zip(map(tuple, followers.tolist()), np.frombuffer(counts, "<u4").tolist(), strict=True))
            if key[0] > MAX_PREFIX_TOKENS:
                phrases[tokens[0]] = rows
            else:
                assert len(tokens) == key[0]
                prefixes[tokens] = total, distinct, rows
    return prefixes, phrases


@pytest.mark.parametrize("examples", [8, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("slots", [1 << 21, 8])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_lookups_equal_counting(
    vocabulary: int,
    slots: int,
    examples: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small alphabets at the top of the vocabulary, counted in one part and in many."""
    monkeypatch.setattr(counting, "MAX_TABLE_SLOTS", slots)
    token = st.integers(vocabulary - 3, vocabulary - 1)
    documents = st.lists(st.lists(token, max_size=16), min_size=1, max_size=6).filter(
        lambda documents: max(map(len, documents)) > PHRASE_TOKENS
    )

    @settings(max_examples=examples)
    @given(documents, st.lists(token, max_size=7), st.integers(1, 40), st.integers(1, 4))
    def check(documents: Documents, context: list[int], top_k: int, per_key: int) -> None:
        options: dict[str, Any] = {"top_k": top_k, "per_key": per_key}
        folder = tmp_path_factory.mktemp("store")
        manifest = build(folder, documents, vocabulary, **options)
        store, oracle = ModelStore(folder, manifest.tokenizer), Oracle(documents, **options)
        for known in [*oracle.prefixes, tuple(context), ()]:
            assert found_by(store, list(known)) == oracle.after(list(known))
        prefixes, phrases = ngrams_in(store)
        assert prefixes == {known: oracle.after(list(known))[len(known)] for known in oracle.prefixes}
        words = range(vocabulary - 3, vocabulary)
        assert phrases == {token: rows for token in words if (rows := oracle.phrases(token))}
        for token in range(vocabulary - 4, vocabulary + 1):
            assert phrases_of(store, token) == oracle.phrases(token)
        assert manifest.counts["keys"] == len(prefixes)
        assert manifest.counts["continuations"] == sum(len(rows) for *_, rows in prefixes.values())
        assert manifest.counts["phrases"] == sum(map(len, phrases.values()))

    check()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_documents_are_kept_with_their_sources(vocabulary: int, tmp_path: Path) -> None:
    top = vocabulary - 1
    documents = [Document([top] * 6), Document([]), Document([0, top], 2), Document(np.array([1, 2, 3, top]), 2)]
    sources = [InputFile("a", "1"), InputFile("b", "2"), InputFile("c", "3")]
    manifest = build_model_store(tmp_path, documents, TokenizerFingerprint("test", vocabulary), sources)
    assert [(share.name, share.sha256, share.records, share.tokens) for share in manifest.sources] == [
        ("a", "1", 1, 6),
        ("b", "2", 0, 0),
        ("c", "3", 2, 6),
    ]
    record = ModelRecord.of(tmp_path, manifest)
    assert [ids.tolist() for ids in record.documents()] == [[top] * 6, [0, top], [1, 2, 3, top]]
    assert record.text().tolist() == [*[top] * 6, top + 1, 0, top, top + 1, 1, 2, 3, top, top + 1]


def parts_of(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    return {part: (folder / file.name).read_bytes() for part, file in manifest.files.items()}


@given(st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=14), min_size=2, max_size=5), st.randoms())
@settings(max_examples=10)
def test_the_same_documents_give_the_same_store(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, random: Random
) -> None:
    """Byte for byte; of documents in another order all is the same but the documents."""
    shuffled = random.sample(documents, len(documents))
    folders = [tmp_path_factory.mktemp("store") for _ in range(3)]
    first, again, other = (
        parts_of(folder, build(folder, ids, 3, top_k=10, per_key=2))
        for folder, ids in zip(folders, [documents, documents, shuffled], strict=True)
    )
    del first["record"], again["record"]  # LMDB lays its pages out as it likes
    assert again == first
    assert {part: other[part] for part in FLAT} == {part: first[part] for part in FLAT}


def test_ngrams_are_listed_by_the_start_of_their_prefix(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5, 6], [1, 2, 300, 4, 5], [256, 2, 3, 4, 5]]
    store = ModelStore(tmp_path, build(tmp_path, documents, 1000).tokenizer)
    prefixes, phrases = ngrams_in(store)
    for start in ([], [1], [2], [1, 2], [2, 300], [256], [1, 2, 3, 4], [1, 2, 3, 4, 5], [999]):
        listed = list(ModelRecord.of(tmp_path, store.manifest).ngrams(start))
        found = [
            prefix for prefix in [*prefixes, *((token,) for token in phrases)] if list(prefix[: len(start)]) == start
        ]
        assert [tuple(entry.prefix) for entry in listed] == found
        for entry in listed:
            rows = [(tuple(ids), count) for ids, count in entry.continuations]
            known = prefixes[tuple(entry.prefix)]
            assert (entry.total, entry.distinct, rows) == known or rows == phrases[entry.prefix[0]]


def test_a_damaged_record_is_not_read(tmp_path: Path) -> None:
    manifest = build(tmp_path, [[1, 2, 3, 4, 5]], 10)
    path = tmp_path / manifest.files["record"].name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"record-\w+\.mdb is damaged: build the store again"):
        ModelRecord.of(tmp_path, manifest)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        ModelRecord.of(tmp_path, manifest)


def test_a_record_made_to_crash_lmdb_is_not_read(tmp_path: Path) -> None:
    """Whoever makes a store makes its checksums fit."""
    manifest = build(tmp_path, [[1, 2, 3, 4, 5]], 10)
    path = tmp_path / manifest.files["record"].name
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        page_size = environment.stat()["psize"]
    pages = np.fromfile(path, np.uint8).reshape(-1, page_size)
    for number, page in enumerate(pages):
        if page[:8].view("<u8") == number and page[10] == LEAF_PAGE:
            node = int(page[PAGE_HEADER_BYTES:].view("<u2")[0])
            page[node + 2 : node + 4] = 0x7F, 0x7F  # its value has two gigabytes
    pages.tofile(path)
    forged = replace(manifest.files["record"], sha256=file_checksum(path))
    with pytest.raises(StoreError, match=r"is damaged \(page \d+ is none of a tree\)"):
        ModelRecord.of(tmp_path, replace(manifest, files={**manifest.files, "record": forged}))


def test_any_context_is_taken(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, build(tmp_path, [[5, 6, 7, 8, 9, 5, 6]], 10).tokenizer)
    known = {1: (1, 1, [((6,), 1)])}
    for context in ([5], (5,), np.array([5], np.uint16), [4, 3, 2, 1, 5], [2**40, -1, 5]):
        assert found_by(store, context) == known
    for unknown in ([], [5, 4], [-1], [10], [2**40], np.empty(0, np.int64)):
        assert found_by(store, unknown) == {}
    assert phrases_of(store, 5) == [((6, 7, 8, 9), 1)]
    for token in (4, -1, 10, 2**40):
        assert phrases_of(store, token) == []


def test_only_the_files_of_the_store_are_left(tmp_path: Path) -> None:
    manifest = build(tmp_path, [[1, 2, 3, 4, 5]], 10)
    names = {file.name for file in manifest.files.values()}
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == names | {"manifest.json"}
    assert manifest.files["record"].bytes <= 1 << 17, "a store of one entry needs a few pages"


@pytest.mark.parametrize(("documents", "found"), [([[]], "no text at all"), ([[1, 2, 3, 4]], "has 4 tokens")])
def test_answers_too_short_for_a_store_are_refused(documents: Documents, found: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=found):
        build(tmp_path, documents, 10)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.long
def test_memory_does_not_grow_with_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MAX_TABLE_SLOTS", 1 << 12)
    monkeypatch.setattr(
        local_executor, "PARALLEL_LENGTHS", 1
    )  # which lengths meet in memory would be a matter of chance
    mark, source = TokenizerFingerprint("test", 1000), InputFile("test", "")

    def documents(number: int) -> Iterator[Document]:
        rng = np.random.default_rng(0)
        return (Document(rng.integers(0, 1000, 100)) for _ in range(number))

    def peak(number: int) -> int:
        tracemalloc.start()
        build_model_store(tmp_path, documents(number), mark, [source], top_k=100)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(10)  # what compiling takes
    # Counted whole, the larger would take 19 MB more; the checksums' buffers come and go as it happens.
    assert peak(4800) < peak(150) + (2 << 20)


@pytest.mark.parametrize("part", FLAT)
def test_damage_costs_a_draft_at_worst(part: str, tmp_path: Path) -> None:
    """Flipped bytes are for `inspect --verify` to find; a lookup on them must stay within its files."""
    random = Random(part)
    documents = [[random.randrange(30) for _ in range(30)] for _ in range(30)]
    manifest = build(tmp_path, documents, 30)
    path = tmp_path / manifest.files[part].name
    whole = path.read_bytes()
    for _ in range(60):
        spoiled = bytearray(whole)
        for _ in range(random.randrange(1, 40)):
            spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
        path.write_bytes(spoiled)
        assert damaged_files(tmp_path, manifest) == [path.name]
        store = ModelStore(tmp_path)
        for ids in documents:
            for entry in store.after(ids[:10]):
                assert ((entry.tokens >= 0) & (entry.tokens < 30)).all()
            phrases, _ = store.phrases_after(ids[0])
            assert ((phrases >= 0) & (phrases < 30)).all()


def hash_of(token: int) -> np.uint64:
    """The hash of a prefix of one token; compiled code returns it as a plain integer."""
    return np.uint64(mix_hash(np.uint64(0), token))


def crowded(count: int, bits: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens, a row each, whose search begins in the same slot in all tables of up to ``2**bits`` slots."""
    found = [token for token in range(count << (bits + 1)) if slot_of(hash_of(token), (1 << bits) - 1) == 5]
    return np.array(found[:count], np.int64)[:, None]


def test_a_table_grows_until_every_search_is_short() -> None:
    heads = crowded(MAX_PROBES + 50, 10)
    keys = np.zeros((len(heads), KEY_WIDTH), np.int32)
    assert table_size(len(heads)) <= 1 << 10
    slots = _hash_table(keys, [heads[:40], heads[40:]])
    assert table_size(len(heads)) < len(slots) <= table_size(len(heads)) << MAX_DOUBLINGS
    for number, (token,) in enumerate(heads.tolist()):
        assert find_key(slots, keys, hash_of(token)) == number


def test_equal_hashes_do_not_grow_a_table_for_ever() -> None:
    heads = np.full((2 * MAX_PROBES, 1), 7)
    keys = np.zeros((len(heads), KEY_WIDTH), np.int32)
    slots = _hash_table(keys, [heads])
    assert len(slots) == table_size(len(heads)) << MAX_DOUBLINGS
    assert np.count_nonzero(slots >= 0) == MAX_PROBES
    assert find_key(slots, keys, hash_of(7)) == 0


def test_a_full_table_is_not_read_to_its_end() -> None:
    """In a table without a free slot, a key is found as far as a search goes, and not after that."""
    mark = hash_of(7)
    keys = np.zeros((2, KEY_WIDTH), np.int32)
    keys[1, :2] = split_hash(mark)
    start, mask = slot_of(mark, (1 << 12) - 1), (1 << 12) - 1
    for distance, found in ((0, 1), (MAX_PROBES - 1, 1), (MAX_PROBES, -1), (mask, -1)):
        slots = np.zeros(1 << 12, np.int32)
        slots[(start + distance) & mask] = 1
        assert find_key(slots, keys, mark) == found
        record = np.zeros(1, MODEL_RECORD)
        record["slots"], record["keys"] = (slots.ctypes.data, len(slots)), (keys.ctypes.data, len(keys))
        keys[1, [KEY_TOTAL]] = 3
        assert lookup_hash(record[0], mark)[2] == (3 if found > 0 else 0)


def test_phrases_stay_within_their_limit_whatever_the_heads_hold(tmp_path: Path) -> None:
    manifest = build(tmp_path, [[token, 1, 2, 3, 4] for token in range(5, 10)], 10)
    path = tmp_path / manifest.files["heads"].name
    heads = np.fromfile(path, np.int32)
    for start, stop in ((0, -1), (-9, 99), (3, 1), (2**31 - 1, -(2**31))):
        heads[5:7] = start, stop
        heads.tofile(path)
        assert len(ModelStore(tmp_path).phrases_after(5, 2)[0]) <= 2
