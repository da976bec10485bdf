"""The context table against a brute-force reading of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hdtool.runtime.drafters.hierarchy.matching_sources import (
    MATCH_RECORD,
    MAX_NODE_MATCHES,
    MAX_ROOT_MATCHES,
    MAX_SHORT_ORDER,
    add_short_matches,
    find_matches,
    order_of_match,
)
from hdtool.runtime.stores.context_table import (
    CHAIN_LENGTHS,
    CONTEXT_WINDOW,
    LONG_CHAIN,
    ContextTable,
    latest_position,
)
from hdtool.runtime.stores.model_store import sequence_hash
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS

Places = list[tuple[int, int]]


class Finder:
    """Finds matches at the root and at nodes below it, as the estimator does."""

    def __init__(self, table: ContextTable) -> None:
        self._table = table.memory[0]
        self._found = np.zeros(1, MATCH_RECORD)

    def find(self, tail: list[int], *, node: int = 0, short: bool = False) -> Places:
        """What followed, and the n-gram order of the match, in the order in which they were found."""
        padded = np.array([-1] * MAX_MATCH_TOKENS + tail, np.int64)[-MAX_MATCH_TOKENS:]
        hashes = [
            int(sequence_hash(padded, MAX_MATCH_TOKENS - size, size)) for size in range(CHAIN_LENGTHS[LONG_CHAIN] + 1)
        ]
        marks = np.array(hashes, np.uint64)
        find_matches(self._table, self._found[0], node, node - 1, padded, marks)
        if short:
            add_short_matches(self._table, self._found[0], node, padded, marks)
        count = self._found["followers"][0]
        followers, orders = self._found["tokens"][0, :count], self._found["orders"][0, :count]
        return list(zip(followers.tolist(), orders.tolist(), strict=True))


def latest(context: list[int], tail: list[int], least: int, most: int) -> Places:
    """The latest places that so many tokens before them match, and how many do, by brute force."""
    found: Places = []
    for place in range(len(context) - 1, 0, -1):
        length = 0
        while length < min(MAX_MATCH_TOKENS, place, len(tail)) and context[place - 1 - length] == tail[-1 - length]:
            length += 1
        if length >= least and len(found) < most:
            found.append((place, length))
    return found


def followers(context: list[int], places: Places) -> Places:
    return [(context[place], order_of_match(length)) for place, length in places]


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=10))
def test_followers_are_those_of_the_latest_places(context: list[int], tail: list[int]) -> None:
    table = ContextTable()
    table.read(context)
    for asked in (tail, context):
        long = latest(context, asked, CHAIN_LENGTHS[LONG_CHAIN], MAX_ROOT_MATCHES)
        assert Finder(table).find(asked) == followers(context, long)
        short = [
            (at, length) for at, length in latest(context, asked, 1, MAX_ROOT_MATCHES) if length <= MAX_SHORT_ORDER
        ]
        assert Finder(table).find(asked, short=True) == followers(context, [*long, *short][:MAX_ROOT_MATCHES])


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans())
def test_nodes_inherit_what_their_tokens_continue(context: list[int], path: list[int], short: bool) -> None:
    table = ContextTable()
    table.read(context)
    finder, tail = Finder(table), list(context)
    finder.find(tail, short=short)
    expected = latest(context, tail, CHAIN_LENGTHS[LONG_CHAIN], MAX_ROOT_MATCHES)
    if short:
        shorter = latest(context, tail, 1, MAX_ROOT_MATCHES)
        expected = [*expected, *((at, length) for at, length in shorter if length < CHAIN_LENGTHS[LONG_CHAIN])][
            :MAX_ROOT_MATCHES
        ]
    for node, token in enumerate(path, start=1):
        tail = [*tail, token]
        expected = [
            (at + 1, min(MAX_MATCH_TOKENS, length + 1))
            for at, length in expected
            if context[at] == token and at + 1 < len(context)
        ]
        expected = expected or latest(context, tail, 1, MAX_NODE_MATCHES)
        assert finder.find(tail, node=node) == followers(context, expected)


@settings(max_examples=10)
@given(st.integers(0, 2 * CONTEXT_WINDOW), st.integers(0, 10**6))
def test_what_is_too_old_is_forgotten(before: int, seed: int) -> None:
    context = np.random.default_rng(seed).integers(0, 40, before + CONTEXT_WINDOW).tolist()
    table = ContextTable()
    table.read(context)
    kept = context[-CONTEXT_WINDOW:]
    rare = [50_000, 60_000, 70_000]
    table.add([*rare, 1, *rare])
    assert Finder(table).find(rare) == [(1, 3)]
    for start in (0, 1, CONTEXT_WINDOW // 2):
        tail = kept[start + 20 : start + 23]
        context = [*kept, *rare, 1, *rare][-CONTEXT_WINDOW:]
        assert Finder(table).find(tail) == followers(
            context, latest(context, tail, CHAIN_LENGTHS[LONG_CHAIN], MAX_ROOT_MATCHES)
        )


def test_the_next_turn_reads_only_what_is_new() -> None:
    table = ContextTable()
    assert table.read([1, 2, 3]) == 3
    table.add([4, 5])
    assert table.read([1, 2, 3, 4, 5, 6, 7]) == 2
    assert table.read([1, 2, 3, 4, 5, 6, 7]) == 0
    assert table.read([1, 2, 3, 9]) == 4, "another conversation"
    assert Finder(table).find([5], short=True) == []
    assert table.read([1, 2]) == 2, "an earlier turn, asked again"
    assert table.read([]) == 0
    assert len(table) == 0


def test_a_long_conversation_is_continued_by_what_is_left_of_it() -> None:
    context = np.random.default_rng(1).integers(0, 1000, CONTEXT_WINDOW + 5000).tolist()
    table = ContextTable()
    table.read(context)
    assert table.read([*context, 1]) == 1
    assert table.read([*context[:-1], 1001, 1]) == len(context) + 1


@pytest.mark.parametrize("length", [0, 32_000, 200_000])
def test_memory_is_bounded(length: int) -> None:
    table = ContextTable()
    table.read(list(range(length)))
    assert table.nbytes < 1 << 20


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 9))
def test_the_latest_place_of_a_token_is_found(context: list[int], token: int) -> None:
    table = ContextTable()
    table.read(context)
    earlier = [place for place, other in enumerate(context[:-1]) if other == token]
    assert latest_position(table.memory[0], token) == (earlier[-1] if earlier else -1)


def test_the_latest_place_is_within_the_window() -> None:
    table = ContextTable()
    table.read([7, *[1, 2] * (CONTEXT_WINDOW // 2)])
    assert latest_position(table.memory[0], 7) == -1, "the ring no longer holds it"
    assert latest_position(table.memory[0], 1) == CONTEXT_WINDOW - 1
    table.reset()
    assert latest_position(table.memory[0], 1) == -1
