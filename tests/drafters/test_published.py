"""Methods of others: their drafts against plain definitions of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from hdtool.data.errors import HdtoolError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.published import racer
from hdtool.runtime.drafters.published.racer import MAX_TRIE_NODES, NGRAM_LENGTH, NgramTrie, Racer
from hdtool.runtime.drafters.published.suffix_automaton import TOKENS_AHEAD, SamDecoding
from hdtool.runtime.drafters.published.suffix_decoding import SuffixConfig, SuffixDecoding
from hdtool.runtime.drafters.published.token_recycling import CHILDREN, RECYCLED_PER_TOKEN, TokenRecycling
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from tests.support.trees import check_integrity

VOCABULARY = 12
NO_LOGITS = Verified(torch.empty(0))
words = st.lists(st.integers(0, 3), min_size=1, max_size=40)
Paths = dict[tuple[int, ...], float]


def occurrences(text: Sequence[int], word: Sequence[int]) -> list[int]:
    """The places after each occurrence."""
    size = len(word)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(word)]


def longest_match(text: Sequence[int]) -> int:
    return max((size for size in range(1, len(text)) if len(occurrences(text, text[-size:])) > 1), default=0)


@given(words)
@example([5])
@example([5, 5])
def test_sam_follows_the_first_place_of_the_longest_match(text: list[int]) -> None:
    drafter = SamDecoding()
    drafter.begin(text[:3])
    drafter.observe(Accepted([], text[3:]), NO_LOGITS)
    tree = drafter.draft(text)
    check_integrity(tree)
    length = longest_match(text)
    start = occurrences(text, text[-length:])[0] if length else len(text)
    assert tree.tokens.tolist() == text[start : start + TOKENS_AHEAD]
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


def tree_of_match(text: Sequence[int], match: Sequence[int], max_nodes: int, least: float) -> Paths:
    """The most probable continuations of a match, by their paths; ties make the choice, and not the sum, ambiguous."""
    found: Paths = {}
    waiting: Paths = {(): 1.0}
    while waiting and len(found) <= max_nodes:
        path = max(waiting, key=lambda one: (waiting[one], -len(one)))
        prob = found[path] = waiting.pop(path)
        ends = occurrences(text, [*match, *path])
        followers = Counter(text[end] for end in ends if end < len(text))
        for token, count in followers.items():
            if prob * count / len(ends) >= least - 1e-12:
                waiting[*path, token] = prob * count / len(ends)
    del found[()]
    return found


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


@settings(deadline=None)
@given(words, st.sampled_from([SuffixConfig(), SuffixConfig(2.0, 3.0, 0.0)]), st.integers(1, 12))
def test_suffix_drafts_the_tree_with_the_most_expected_tokens(
    text: list[int], config: SuffixConfig, max_nodes: int
) -> None:
    drafter = SuffixDecoding(FixedBudget(max_nodes), config, remembers=False)
    drafter.begin(text[:2])
    drafter.observe(Accepted([], text[2:]), NO_LOGITS)
    tree = drafter.draft(text)
    check_integrity(tree)
    trees = {
        length: tree_of_match(
            text,
            text[-length:],
            min(max_nodes, int(config.nodes_per_token * length + config.extra_nodes)),
            config.min_prob,
        )
        for length in range(1, longest_match(text) + 1)
    }
    best = max((sum(one.values()) for one in trees.values()), default=0.0)
    drafted = paths_of(tree)
    scores = []
    for length in trees:
        ends = [occurrences(text, [*text[-length:], *path]) for path in drafted]
        if all(ends) and len(trees[length]) == len(drafted):
            scores.append(_expected(text, text[-length:], drafted))
    assert not drafted or max(scores) == pytest.approx(best)
    assert bool(drafted) == (best > 0)


def _expected(text: Sequence[int], match: Sequence[int], paths: Sequence[tuple[int, ...]]) -> float:
    probs: Paths = {(): 1.0}
    for path in paths:
        before, now = occurrences(text, [*match, *path[:-1]]), occurrences(text, [*match, *path])
        probs[path] = probs[path[:-1]] * len(now) / len(before)
    return sum(probs.values()) - 1.0


def test_suffix_remembers_answers_and_not_prompts() -> None:
    for remembers in (True, False):
        drafter = SuffixDecoding(remembers=remembers)
        drafter.begin([1, 2, 3])
        drafter.observe(Accepted([], [7, 8, 9, 10]), NO_LOGITS)
        drafter.begin([4, 5])
        drafter.observe(Accepted([], [6, 7, 8]), NO_LOGITS)
        tree = drafter.draft([4, 5, 6, 7, 8])
        assert tree.tokens.tolist() == ([9, 10] if remembers else [])
        assert set(tree.sources.tolist()) <= {SourceId.HISTORY}
        drafter.begin([9, 1, 2])
        assert not len(drafter.draft([9, 1, 2]))


def logits_of(rows: dict[int, list[int]], size: int) -> Verified:
    """Logits whose best tokens are given by row; the others are unknown, as in a recording."""
    logits = torch.full((size, VOCABULARY), -torch.inf)
    for row, tokens in rows.items():
        logits[row, tokens] = torch.arange(len(tokens), 0, -1, dtype=torch.float32)
    return Verified(logits)


@pytest.mark.parametrize("drafter", [TokenRecycling(), Racer()])
def test_rankings_of_verified_tokens_come_back(drafter: Drafter) -> None:
    drafter.begin([1])
    drafter.observe(Accepted([], [2]), logits_of({0: [2, 3]}, 1))
    assert paths_of(drafter.draft([1, 2])) == []
    drafter.observe(Accepted([], [1]), logits_of({0: [4, 1]}, 1))
    tree = drafter.draft([1, 2, 1])
    check_integrity(tree)
    paths = paths_of(tree)
    assert {(2,), (3,), (2, 4), (2, 1), (2, 1, 2)} <= set(paths)
    assert (3, 4) not in paths and len(set(paths)) == len(paths)
    assert set(tree.sources.tolist()) == {SourceId.RECYCLED}


@pytest.mark.parametrize("make", [TokenRecycling, Racer])
def test_memory_lasts_as_long_as_it_should(make: type[TokenRecycling] | type[Racer]) -> None:
    for remembers in (True, False):
        drafter = make(remembers=remembers)
        drafter.begin([1])
        drafter.observe(Accepted([], [2]), logits_of({0: [2, 3]}, 1))
        drafter.begin([1, 2, 5, 1])
        assert len(drafter.draft([1, 2, 5, 1])) > 0, "another turn of the same conversation"
        drafter.observe(Accepted([], [3]), NO_LOGITS)
        drafter.begin([6, 1])
        assert (len(drafter.draft([6, 1])) > 0) == remembers


def test_the_tree_of_token_recycling_is_that_of_its_paper() -> None:
    """80 nodes in six levels."""
    assert [sum(level) for level in CHILDREN] == [8, 21, 25, 15, 8, 3, 0]
    for level, following in pairwise(CHILDREN):
        assert len(following) == sum(level)


def test_the_breadths_of_racer_are_halved() -> None:
    drafter = Racer(FixedBudget(40))
    drafter.begin([0])
    tokens = list(range(1, 1 + RECYCLED_PER_TOKEN))
    drafter.observe(Accepted([], [1]), logits_of({0: tokens}, 1))
    tree = drafter.draft([0, 1])
    for token in [*tokens, 1]:
        drafter.observe(Accepted([], [token]), logits_of({0: tokens}, 1 + len(tree)))
        tree = drafter.draft([0, 1, token])
    counts = Counter(path[0] for path in paths_of(tree) if len(path) == 2)
    assert [counts[token] for token in tokens] == [8, 4, 2, 1, 1, 1, 1, 1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 30))
def test_the_trie_gives_the_most_frequent_continuations(text: list[int], max_nodes: int) -> None:
    trie = NgramTrie()
    trie.add(text[:20], 0)
    trie.add(text, 20)
    rows = trie.after(text, max_nodes)
    grams = [text[start : start + NGRAM_LENGTH] for start in range(len(text) - NGRAM_LENGTH + 1)]
    counts = Counter(tuple(gram[:size]) for gram in grams for size in range(1, NGRAM_LENGTH + 1))
    expected: list[int] = []
    for length in range(min(len(text), NGRAM_LENGTH - 1), racer.MIN_MATCH_TOKENS - 1, -1):
        match = tuple(text[-length:])
        expected += [count for gram, count in counts.items() if len(gram) > length and gram[:length] == match]
    found = []
    for row, size in zip(rows.tolist(), (rows >= 0).sum(axis=1).tolist(), strict=True):
        assert row[size:] == [-1] * (NGRAM_LENGTH - size)
        path = tuple(row[:size])
        found.append(
            {counts[(*text[-n:], *path)] for n in range(2, NGRAM_LENGTH - size + 1) if (*text[-n:], *path) in counts}
        )
    best = sorted(expected, reverse=True)[:max_nodes]
    assert len(found) == len(best)
    assert all(count in options for count, options in zip(best, found, strict=True))


def test_a_full_trie_forgets_what_was_used_least_recently() -> None:
    trie = NgramTrie()
    kept = [5, 6, 7, 8, 9, 5, 6, 7, 8, 10]
    for start in range(11, 3 * MAX_TRIE_NODES, NGRAM_LENGTH):
        trie.add(list(range(start, start + NGRAM_LENGTH)), 0)
        trie.add(kept, 0)
        rows = trie.after(kept[:4], 8)
        assert kept[4:] in [row[: len(kept) - 4] for row in rows.tolist()]
    assert not len(trie.after([11, 12, 13], 8))
    memory = trie.memory[0]
    assert memory["size"] == MAX_TRIE_NODES
    ring, node = set(), int(memory["later"][0])
    while node:
        ring.add(node)
        node = int(memory["later"][node])
    assert len(ring) == MAX_TRIE_NODES - 1
    children = np.bincount(memory["parents"][1:], minlength=MAX_TRIE_NODES)
    assert children[memory["later"][0]] == 0, "the oldest node is a leaf"


@pytest.mark.parametrize("method", ["suffix", "tr", "racer"])
def test_their_memory_is_not_kept_on_disk(method: str) -> None:
    assert DecodeConfig(method, history="none")
    with pytest.raises(HdtoolError, match=f"history must be memory or none with method {method}, got home"):
        DecodeConfig(method, history="home")
