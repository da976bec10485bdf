"""The ring of tokens against a brute-force search, while answers are interleaved, the ring grows and wraps."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.token_log import (
    CHAIN_KEY_TOKENS,
    LOG_BLOCK,
    MAX_LOG_POSITION,
    MAX_MATCHES,
    OVERLAP_TOKENS,
    TOKEN,
    TokenLog,
    entries_of,
    matches,
)

VOCABULARY = 3
LANES = 3
Action = tuple[int, str, list[int]]

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=90)
ACTIONS = st.lists(st.tuples(st.integers(0, LANES - 1), st.sampled_from("aaaasSf"), TOKENS), max_size=40)


class Answer:
    """What was appended to a lane."""

    def __init__(self, log: TokenLog, lane: Any, tokens: list[int], learned: bool) -> None:
        log.start(lane, tokens, learned=learned)
        copied = tokens if learned else tokens[-OVERLAP_TOKENS:]
        split = min(CHAIN_KEY_TOKENS, len(copied)) if learned else len(copied)
        self.before, self.tokens = copied[:split], copied[split:]


def run(log: TokenLog, actions: list[Action]) -> None:
    lanes, answers = [log.lane() for _ in range(LANES)], [Answer(log, log.lane(), [], False)] * LANES
    started = [False] * LANES
    for number, act, tokens in actions:
        if act == "f" or (act in "sS" and started[number]):
            check_answer(log, lanes[number], answers[number], started[number])
            log.finish(lanes[number])
            started[number] = False
        if act in "sS":
            answers[number], started[number] = Answer(log, lanes[number], tokens, act == "S"), True
        if act == "a" and started[number]:
            log.append(lanes[number], tokens)
            answers[number].tokens = answers[number].tokens + tokens
        check_places(log)


def check_answer(log: TokenLog, lane: Any, answer: Answer, started: bool) -> None:
    """The lane gives its answer back, or the end of it if the ring has overwritten the start."""
    before, tokens = log.answer(lane)
    whole = answer.tokens if started else []
    assert tokens.tolist() == (whole[-len(tokens) :] if len(tokens) else [])
    if len(before) + len(tokens) == len(answer.before) + len(answer.tokens):
        assert tokens.tolist() == whole and before.tolist() == (answer.before if started else [])
    else:
        assert len(log) >= log.max_positions - LOG_BLOCK or not started, "only a full ring forgets"


def check_places(log: TokenLog) -> None:
    """Each chain leads to the latest places after its tokens, those of a lane among them."""
    size, end = int(log.memory["size"][0]), int(log._end[0])
    ring = entries_of(log.memory[0])
    oldest = max(0, end - size)
    at = {place: int(ring[place & (size - 1), TOKEN]) for place in range(oldest, end)}
    for tail in [(first, second) for first in range(VOCABULARY) for second in range(VOCABULARY)]:
        found, _ = matches(log.memory, np.array(tail))
        places = [
            place for place in at if place > oldest + 1 and (at[place - 2], at[place - 1]) == tail and at[place] >= 0
        ]
        # A block begins with a copy; the first place after tokens that are on no chain is not found.
        assert set(found.tolist()) <= set(places) | {place for place in at if at[place] < 0}
        assert found.tolist() == sorted(found.tolist(), reverse=True)


@given(ACTIONS)
def test_interleaved_answers_are_found_and_given_back(actions: list[Action]) -> None:
    run(TokenLog(max_positions=1 << 10, size=1 << 8), actions)


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=200), min_size=1, max_size=12))
def test_one_answer_after_another_is_found_wherever_it_occurs(answers: list[list[int]]) -> None:
    """The places found are those of a brute-force search of the answers that are kept."""
    log = TokenLog(max_positions=1 << 14, size=1 << 7)
    lane = log.lane()
    for tokens in answers:
        log.start(lane, [])
        log.append(lane, tokens)
        log.finish(lane)
    for tail in [(first, second) for first in range(VOCABULARY) for second in range(VOCABULARY)]:
        found, lengths = matches(log.memory, np.array(tail))
        expected = [
            tokens[at]
            for tokens in reversed(answers)
            for at in range(len(tokens) - 1, CHAIN_KEY_TOKENS - 1, -1)
            if tuple(tokens[at - CHAIN_KEY_TOKENS : at]) == tail
        ]
        ring = entries_of(log.memory[0])
        assert [int(ring[place, TOKEN]) for place in found.tolist()] == expected[:MAX_MATCHES]
        assert (lengths == CHAIN_KEY_TOKENS).all()


def test_a_ring_that_wrapped_before_it_grows_keeps_the_latest_tokens() -> None:
    log = TokenLog(max_positions=1 << 10, size=1 << 8)
    lane, other = log.lane(), log.lane()
    log.start(lane, [])
    tokens = (np.arange(600) % 251).tolist()
    log.append(lane, tokens)
    log.start(other, [])
    assert int(log.memory["size"][0]) == 1 << 10
    kept = log.answer(lane)[1].tolist()
    assert len(kept) > 100 and kept == tokens[-len(kept) :]
    log.append(lane, [1, 2, 3])
    assert log.answer(lane)[1].tolist() == [*kept, 1, 2, 3]


def test_a_discarded_answer_has_no_owner() -> None:
    history = History(1 << 8)
    lane = history.lane()
    history.start(lane, [1, 2], 2)
    history.answers.append(lane, [3, 4, 5])
    owner = int(lane["owner"][0])
    assert (history.answers._owners == owner).any()
    history.answers.discard(owner)
    assert not (history.answers._owners == owner).any()


def test_a_ring_begins_anew_before_the_numbers_of_its_places_run_out() -> None:
    log = TokenLog()
    lane = log.lane()
    log._end[0] = MAX_LOG_POSITION + LOG_BLOCK
    log.start(lane, [1, 2])
    log.append(lane, [3, 4, 5])
    log.finish(lane)
    assert len(log) == LOG_BLOCK
    found, _ = matches(log.memory, np.array([2, 3], np.int64))
    assert [int(entries_of(log.memory[0])[place, TOKEN]) for place in found] == [4]
