"""The suffix automaton against all substrings, counted one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from hdtool.runtime.drafters.published.suffix_automaton import (
    LAST_STATE,
    NO_STATE,
    START_STATE,
    SuffixAutomaton,
    advance,
    after,
)

words = st.lists(st.integers(0, 3), max_size=30)
texts = st.lists(words, max_size=4)


def automaton_of(texts: list[list[int]], room: int = 1) -> SuffixAutomaton:
    automaton = SuffixAutomaton(room)
    for text in texts:
        automaton.end_text()
        for start in range(0, len(text), 7):
            automaton.extend(text[start : start + 7])
    return automaton


def counted(texts: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )


def state_of(automaton: SuffixAutomaton, word: tuple[int, ...]) -> int:
    state: Any = START_STATE
    for token in word:
        if state != NO_STATE:
            state = after(automaton.arrays, state, token)
    return int(state)


@given(texts)
def test_it_counts_each_substring(texts: list[list[int]]) -> None:
    automaton, expected = automaton_of(texts), counted(texts)
    joined = [token for text in texts for token in text]
    for word, times in expected.items():
        state = state_of(automaton, word)
        assert automaton.arrays.counts[state] == times
        end = int(automaton.arrays.ends[state])
        assert tuple(joined[end - len(word) : end]) == word
        firsts = {one for one in expected if one[:-1] == word}
        edge, seen = automaton.arrays.edges[state], set()
        while edge != NO_STATE:
            seen.add((*word, int(automaton.arrays.labels[edge])))
            edge = automaton.arrays.nexts[edge]
        assert seen == firsts
    for word in ((0, 1, 2, 3), (3, 3, 3), (2,)):
        assert (state_of(automaton, word) != NO_STATE) == (word in expected)


@given(words)
def test_links_are_the_matches_of_the_end(text: list[int]) -> None:
    """The lengths along the links are those of suffixes with more and more places."""
    automaton, counts = automaton_of([text]), counted([text])
    by_count: dict[int, int] = {}
    for length in range(1, len(text) + 1):
        times = counts[tuple(text[-length:])]
        by_count[times] = max(by_count.get(times, 0), length)
    state, found = int(automaton.arrays.sizes[LAST_STATE]), {}
    while state > START_STATE:
        found[int(automaton.arrays.counts[state])] = int(automaton.arrays.lengths[state])
        state = int(automaton.arrays.links[state])
    assert found == by_count


@given(texts, words)
def test_another_text_is_followed_by_its_longest_suffix(texts: list[list[int]], other: list[int]) -> None:
    automaton, known = automaton_of(texts), counted(texts)
    state, matched = advance(automaton.arrays, START_STATE, 0, np.array(other, np.int64))
    longest = max((size for size in range(1, len(other) + 1) if tuple(other[-size:]) in known), default=0)
    assert matched == longest
    assert state == state_of(automaton, tuple(other[len(other) - longest :]))


def test_nothing_is_left_after_clearing() -> None:
    automaton = automaton_of([[1, 2, 3, 1, 2]])
    automaton.clear()
    automaton.extend([2, 3])
    assert state_of(automaton, (1,)) == NO_STATE
    assert automaton.arrays.counts[state_of(automaton, (2, 3))] == 1
    assert len(automaton) == 2
