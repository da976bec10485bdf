"""The corpus index against a brute-force reading of the documents."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hdtool.builders.stores.build_stores import build_corpus_index
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.builders.stores.suffix_array import suffix_array
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_folder import damaged_files
from hdtool.runtime.stores.corpus_index import CONTINUATION_DEPTH, MATCH_SAMPLES, MAX_CONTEXT_TOKENS, CorpusIndex
from hdtool.runtime.stores.inspect_store import continuations
from hdtool.runtime.stores.suffix_ranges import (
    MAX_RANGE_ORDER,
    MAX_SAMPLES,
    count_followers,
    narrow,
    range_record,
    read_samples,
    size_of,
)
from tests.support.stores import Documents, index_of


def brute_force(documents: Documents, context: list[int]) -> tuple[int, Counter[tuple[int, ...]]]:
    """The longest suffix that occurs, and how often each continuation follows it."""
    for length in range(min(len(context), MAX_CONTEXT_TOKENS), 0, -1):
        suffix = context[-length:]
        places = [
            (ids, at + length)
            for ids in documents
            for at in range(len(ids) - length + 1)
            if ids[at : at + length] == suffix
        ]
        if places:
            follows: Counter[tuple[int, ...]] = Counter()
            for ids, at in places:
                for depth in range(1, CONTINUATION_DEPTH + 1):
                    if at + depth <= len(ids):
                        follows[tuple(ids[at : at + depth])] += 1
            return length, follows
    return 0, Counter()


@pytest.mark.each_value
@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("shard_bytes", [1 << 20, 120])
@pytest.mark.parametrize("vocabulary", [4, 65_535, 65_536, 200_000])
def test_continuations_are_those_of_the_documents(
    vocabulary: int, shard_bytes: int, examples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Small alphabets at the top of the vocabulary: many repeats, and every byte width."""
    token = st.integers(vocabulary - 4, vocabulary - 1)

    @settings(max_examples=examples)
    @given(st.lists(st.lists(token, max_size=12), min_size=1, max_size=8), st.lists(token, max_size=20))
    def check(documents: Documents, context: list[int]) -> None:
        if not any(documents):
            return
        index = index_of(tmp_path_factory.mktemp("index"), documents, vocabulary, shard_bytes)
        found = index.after(context, max_nodes=10_000)
        matched, follows = brute_force(documents, context)
        assert found.matched == matched
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        seen = {}
        for node, (token, parent) in enumerate(zip(found.tokens.tolist(), found.parents.tolist(), strict=True)):
            assert parent < node
            paths[node] = (*paths[parent], token)
            seen[paths[node]] = int(found.counts[node])
        assert seen == dict(follows)
        assert list(found.counts) == sorted(found.counts, reverse=True)
        short = index.after(context, max_nodes=3)
        assert list(short.tokens) == list(found.tokens[:3])

    check()


@pytest.mark.parametrize("shard_bytes", [1 << 20, 60])
def test_ranges_of_a_draft_tree_are_those_of_a_lookup(
    shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The hierarchy narrows its parent's range, ``after`` starts from the heads table: the same matches."""

    @given(
        st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=8).filter(any),
        st.lists(st.integers(-1, 5), min_size=1, max_size=9),
        st.integers(0, 3),
    )
    def check(documents: Documents, context: list[int], fewest: int) -> None:
        index = index_of(tmp_path_factory.mktemp("index"), documents, 4, shard_bytes)
        record, _places = range_record(index.shards)
        ranges = record[0]
        tokens, counts = np.empty(MAX_SAMPLES, np.int64), np.empty(MAX_SAMPLES, np.int64)
        tail = np.full(MAX_CONTEXT_TOKENS, -1, np.int64)
        for number, token in enumerate(context, 1):
            tail = np.append(tail[1:], token)
            node = int(number == len(context))
            for order in range(MAX_RANGE_ORDER, 0, -1):
                narrow(index.tokens, ranges, tail, node, 0, order)
                if not node and fewest and (found := size_of(ranges, 0, order)):
                    read_samples(index.tokens, ranges, 0, order, found, fewest)
        for order in range(1, MAX_RANGE_ORDER + 1):
            expected = index.after(context[-order:], max_nodes=10_000)
            found = size_of(ranges, 1, order)
            if order > len(context) or expected.matched < order:
                assert found == 0
                continue
            assert found == expected.num_matches
            read_samples(index.tokens, ranges, 1, order, found, MAX_SAMPLES)
            distinct = count_followers(ranges, 1, order, tokens, counts)
            first = np.flatnonzero(expected.parents < 0)
            shown = dict(zip(expected.tokens[first].tolist(), expected.counts[first].tolist(), strict=True))
            assert dict(zip(tokens[:distinct].tolist(), counts[:distinct].tolist(), strict=True)) == shown

    check()


@pytest.mark.parametrize("shard_bytes", [1 << 20, 60])
def test_what_is_shown_is_what_the_documents_hold(shard_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every continuation occurs as often as shown, and none of the first tokens is missing."""

    @given(
        st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=8).filter(any),
        st.lists(st.integers(0, 3), min_size=1, max_size=9),
    )
    def check(documents: Documents, context: list[int]) -> None:
        def followers(*tokens: int) -> Counter[int]:
            return Counter(
                ids[at + len(tokens)]
                for ids in documents
                for at in range(len(ids) - len(tokens))
                if ids[at : at + len(tokens)] == list(tokens)
            )

        shown = list(continuations(index_of(tmp_path_factory.mktemp("index"), documents, 4, shard_bytes), context))
        lengths = range(min(MAX_RANGE_ORDER, len(context)), 0, -1)
        longest = next((length for length in lengths if followers(*context[-length:])), 0)
        assert {matched for matched, _, _ in shown} == ({longest} if longest else set())
        assert {path[0]: count for _, path, count in shown} == (followers(*context[-longest:]) if longest else {})
        for _, path, count in shown:
            assert followers(*context[-longest:], *path[:-1])[path[-1]] == count

    check()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_the_suffix_array_sorts_what_follows(ids: list[int]) -> None:
    for width in (np.uint16, np.uint32):
        tokens = np.array([token + np.iinfo(width).max - 5 for token in ids], width)
        assert suffix_array(tokens).tolist() == sorted(range(len(ids)), key=lambda at: ids[at:])


def test_more_matches_than_are_read_are_sampled_over_their_whole_range(tmp_path: Path) -> None:
    """Half of the continuations start with a high token: reading the first in order would miss them."""
    documents = [[9, 2 + place % 2, place % 7] for place in range(4 * MATCH_SAMPLES)]
    for shard_bytes in (1 << 20, 1 << 9):
        index = index_of(tmp_path / str(shard_bytes), documents, 10, shard_bytes)
        found = index.after([9])
        assert found.num_matches == len(documents)
        first = {int(token): int(count) for token, count in zip(found.tokens[:2], found.counts[:2], strict=True)}
        assert first == {2: len(documents) // 2, 3: len(documents) // 2}


@pytest.mark.parametrize("part", ["documents", "suffixes", "heads", "signposts", "shards"])
def test_damage_costs_a_draft_at_worst(part: str, tmp_path: Path) -> None:
    """Flipped bytes are for `inspect --verify` to find; a lookup on them must stay within its files."""
    rng = random.Random(part)
    documents = [[rng.randrange(50) for _ in range(30)] for _ in range(40)]
    index = index_of(tmp_path, documents, 50, 600)
    path = tmp_path / index.manifest.files[part].name
    whole = path.read_bytes()
    for _ in range(60):
        spoiled = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoiled)
        assert damaged_files(tmp_path, index.manifest) == [path.name]
        try:
            found = CorpusIndex(tmp_path)
        except StoreError:
            assert part == "shards"
            continue
        for ids in documents:
            drafts = found.after(ids[:10])
            assert ((drafts.tokens >= 0) & (drafts.tokens < 50)).all()
            assert (drafts.parents < np.arange(len(drafts.parents))).all()


def test_several_workers_sort_what_one_does(tmp_path: Path) -> None:
    rng = random.Random(3)
    documents = [Document([rng.randrange(9) for _ in range(50)]) for _ in range(20)]
    mark = TokenizerFingerprint("test", 9)
    whole = []
    for workers in (1, 2):
        manifest = build_corpus_index(
            tmp_path / str(workers),
            documents,
            mark,
            [InputFile("a", "0")],
            shard_bytes=600,
            executor=BuildExecutor(workers),
        )
        assert manifest.counts["shards"] > 2
        whole.append({part: file.sha256 for part, file in manifest.files.items()})
    assert whole[0] == whole[1]


def test_an_empty_corpus_builds_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no text at all"):
        build_corpus_index(tmp_path, [Document([])], TokenizerFingerprint("test", 9), [InputFile("a", "0")])
    with pytest.raises(StoreError, match="holds no store"):
        CorpusIndex(tmp_path)


def test_unknown_contexts_have_no_continuations(tmp_path: Path) -> None:
    index = index_of(tmp_path, [[1, 2, 3]], 9)
    for context in ([], [8], [9], [-5], [10**12], [3]):
        assert len(index.after(context).tokens) == 0
