"""The context table against a brute-force reading of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdtool.runtime.drafters.hierarchy.sources.context_table import (
    CHAINS,
    LONGEST_MATCH,
    PLACES,
    WINDOW,
    ContextTable,
    level_of,
    recent,
)
from hdtool.runtime.stores.model_store import sequence_hash

Places = list[tuple[int, int]]


def found_by(table: ContextTable, tail: list[int], chain: int, longest: int) -> Places:
    """What followed, and how many tokens match, the latest place first."""
    padded = np.array([-1] * LONGEST_MATCH + tail, np.int64)[-LONGEST_MATCH:]
    mark = np.uint64(sequence_hash(padded, LONGEST_MATCH - CHAINS[chain], CHAINS[chain]))
    tokens, lengths = np.zeros(PLACES, np.int64), np.zeros(PLACES, np.int64)
    found = recent(table.memory[0], padded, mark, chain, longest, tokens, lengths)
    return list(zip(tokens[:found].tolist(), lengths[:found].tolist(), strict=True))


def brute_force(context: list[int], tail: list[int], chain: int, longest: int) -> Places:
    found: Places = []
    for place in range(len(context) - 1, 0, -1):
        length = 0
        while length < min(longest, place, len(tail)) and context[place - 1 - length] == tail[-1 - length]:
            length += 1
        if length >= CHAINS[chain] and len(found) < PLACES:
            found.append((context[place], level_of(length)))
    return found


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=10), st.integers(0, 1))
def test_followers_are_those_of_the_latest_places(context: list[int], tail: list[int], chain: int) -> None:
    table = ContextTable()
    table.read(context)
    for longest in (CHAINS[chain], LONGEST_MATCH):
        for asked in (tail, context):
            assert found_by(table, asked, chain, longest) == brute_force(context, asked, chain, longest)


@settings(max_examples=20)
@given(st.integers(0, 2 * WINDOW), st.integers(0, 10**6))
def test_what_is_too_old_is_forgotten(before: int, seed: int) -> None:
    context = np.random.default_rng(seed).integers(0, 40, before + WINDOW).tolist()
    table = ContextTable()
    table.read(context)
    kept = context[-WINDOW:]
    rare = [50_000, 60_000, 70_000]
    table.add([*rare, 1, *rare])
    assert found_by(table, rare, 1, LONGEST_MATCH) == [(1, 3)]
    for start in (0, 1, WINDOW // 2):
        tail = kept[start + 20 : start + 23]
        expected = brute_force([*kept, *rare, 1, *rare][-WINDOW:], tail, 1, LONGEST_MATCH)
        assert found_by(table, tail, 1, LONGEST_MATCH) == expected


def test_the_next_turn_reads_only_what_is_new() -> None:
    table = ContextTable()
    assert table.read([1, 2, 3]) == 3
    table.add([4, 5])
    assert table.read([1, 2, 3, 4, 5, 6, 7]) == 2
    assert table.read([1, 2, 3, 4, 5, 6, 7]) == 0
    assert table.read([1, 2, 3, 9]) == 4, "another conversation"
    assert found_by(table, [5], 0, LONGEST_MATCH) == []
    assert table.read([1, 2]) == 2, "an earlier turn, asked again"
    assert table.read([]) == 0
    assert len(table) == 0


def test_a_long_conversation_is_continued_by_what_is_left_of_it() -> None:
    context = np.random.default_rng(1).integers(0, 1000, WINDOW + 5000).tolist()
    table = ContextTable()
    table.read(context)
    assert table.read([*context, 1]) == 1
    assert table.read([*context[:-1], 1001, 1]) == len(context) + 1


@pytest.mark.parametrize("length", [0, 32_000, 200_000])
def test_memory_is_bounded(length: int) -> None:
    table = ContextTable()
    table.read(list(range(length)))
    assert table.nbytes < 1 << 20
