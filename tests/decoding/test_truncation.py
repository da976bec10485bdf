"""Temperature, top-k, top-p and min-p in one step: the draw is that of the processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.runtime.core import top_k_top_p
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.top_k_top_p import MAX_TOP_K_BY_MAXIMA, UNDECIDED, Truncation, allowed_scores
from tests.support.samplers import race_winner

POSITION = 3


def processors(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[LogitsProcessor]:
    made: list[LogitsProcessor] = []
    if temperature is not None:
        made.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        made.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        made.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        made.append(MinPLogitsWarper(min_p))
    return made


def drawn_after(made: list[LogitsProcessor], race: ExponentialRace, scores: torch.Tensor) -> int:
    """The token that wins the race by the probabilities of the processors."""
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    processed = LogitsProcessorList(made)(ids, scores[None].clone())[0]
    return race_winner(race, POSITION, processed.softmax(-1).numpy())


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocabulary=st.sampled_from([1, 2, 40, 300, 5000]),
    spread=st.sampled_from([0.1, 1.0, 3.0, 9.0]),
    temperature=st.none() | st.floats(0.2, 2.0),
    top_k=st.none() | st.sampled_from([1, 2, 39, 50, MAX_TOP_K_BY_MAXIMA, MAX_TOP_K_BY_MAXIMA + 1, 400]),
    top_p=st.none() | st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.95, 0.999]),
    min_p=st.none() | st.floats(0, 0.9),
)
def test_the_draw_is_that_of_the_processors(
    seed: int,
    vocabulary: int,
    spread: float,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    made = processors(temperature, top_k, top_p, min_p)
    before, draws = Truncation.at_end_of(made)
    assert not before
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=vocabulary).astype(np.float32) * spread)
    race = ExponentialRace(seed)
    assert draws.draw(race, POSITION, scores.numpy()) == drawn_after(made, race, scores)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([1, 2, 8, 41, 300, 5000]),
    size=st.integers(-2, 2),
    share=st.sampled_from([0.01, 0.3, 0.9]),
    temperature=st.none() | st.floats(0.2, 2.0),
    top_k=st.none() | st.sampled_from([1, 2, 50, MAX_TOP_K_BY_MAXIMA, MAX_TOP_K_BY_MAXIMA + 1]),
    top_p=st.none() | st.sampled_from([1e-6, 0.5, 0.95]),
    min_p=st.none() | st.floats(0, 0.9),
)
def test_a_draw_among_allowed_tokens_is_that_under_the_mask(
    seed: int,
    vocabulary: int,
    size: int,
    share: float,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    """A mask may have fewer bits than there are logits, or more."""
    chance = np.random.default_rng(seed)
    scores = chance.normal(size=vocabulary).astype(np.float32) * 3
    bits = np.packbits(chance.random(max(1, vocabulary + 8 * size)) < share, bitorder="little")
    bits[0] |= 1
    allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
    allowed = np.pad(allowed, (0, max(0, vocabulary - len(allowed))))[:vocabulary]
    tokens, found = np.empty(vocabulary, np.int64), np.empty(vocabulary, np.float32)
    count = allowed_scores(scores.ctypes.data, vocabulary, bits, tokens, found)
    assert tokens[:count].tolist() == np.flatnonzero(allowed).tolist()
    made, race = processors(temperature, top_k, top_p, min_p), ExponentialRace(seed)
    draws = Truncation.at_end_of(made)[1]
    drawn = draws.draw(race, POSITION, found[:count], tokens[:count])
    masked = torch.from_numpy(np.where(allowed, scores, np.float32(-np.inf)))
    assert drawn == drawn_after(made, race, masked)
    winner = draws.winner(race, POSITION, scores)
    assert winner in (UNDECIDED, drawn) or not allowed[winner], "no mask changes it"


@pytest.mark.parametrize("worst", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_allowed_scores(worst: float) -> None:
    scores, bits = np.zeros(20, np.float32), np.array([1], np.uint8)
    scores[15] = worst
    tokens, found = np.empty(20, np.int64), np.empty(20, np.float32)
    assert allowed_scores(scores.ctypes.data, 20, bits, tokens, found) == -1


@given(
    seed=st.integers(0, 2**32),
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, -np.inf]), min_size=3, max_size=300).map(lambda of: [*of, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 200]),
)
def test_scores_that_equal_the_lowest_of_the_top_are_kept(seed: int, scores: list[float], top_k: int) -> None:
    made = processors(None, top_k or None, None, None)
    row = torch.tensor(scores)
    race = ExponentialRace(seed)
    assert Truncation.at_end_of(made)[1].draw(race, POSITION, row.numpy()) == drawn_after(made, race, row)


@pytest.mark.parametrize("top_k", [0, 60])
def test_a_nucleus_of_equal_tokens_holds_no_more_than_it_needs(top_k: int) -> None:
    """Of equal tokens the last ones are kept, as after a stable sort; a nucleus is full once it reaches top-p."""
    draws = Truncation(top_k=top_k, top_p=0.25)
    scores = np.full(80, -9.0, np.float32)
    scores[10:50] = 1.0
    drawn = {draws.draw(ExponentialRace(seed), POSITION, scores) for seed in range(600)}
    assert drawn == set(range(39, 50)), "ten weigh a little less than a quarter of all"


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_k": 200}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("worst", [np.nan, np.inf, None])
def test_scores_that_are_not_finite_draw_nothing(options: dict[str, Any], worst: float | None) -> None:
    scores = np.zeros(300, np.float32)
    scores[7] = worst
    if worst is None:
        scores[:] = -np.inf
    for draw in (Truncation(**options).draw, Truncation(**options).winner):
        assert draw(ExponentialRace(1), POSITION, scores) == -1


def test_the_most_probable_token_is_drawn_whatever_is_forbidden_and_others_depend_on_it() -> None:
    scores, race = np.zeros(100, np.float32), ExponentialRace(1)
    scores[40] = 30.0
    assert Truncation(top_k=1, top_p=0.01, min_p=0.5).winner(race, POSITION, scores) == 40
    scores[40] = 0.0
    scores[:50] = 1e-3  # fifty others are more probable than any of the second half
    drawn = [Truncation(top_k=50).winner(ExponentialRace(seed), POSITION, scores) for seed in range(50)]
    assert max(drawn) < 50 and UNDECIDED in drawn


def test_what_comes_before_the_truncation_is_left_to_the_processors() -> None:
    penalty, warm = RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.7)
    top_k, top_p = TopKLogitsWarper(9), TopPLogitsWarper(0.8)
    assert Truncation.at_end_of([penalty, warm, top_p]) == ([penalty], Truncation(0.7, 0, 0.8))
    assert Truncation.at_end_of([top_p, top_k]) == ([top_p], Truncation(top_k=9)), "in another order"
    assert Truncation.at_end_of([warm, penalty]) == ([warm, penalty], Truncation())
    two = TopPLogitsWarper(0.8, min_tokens_to_keep=2)
    assert Truncation.at_end_of([warm, two]) == ([warm, two], Truncation())
    finite = TopKLogitsWarper(9, filter_value=-1e4)
    assert Truncation.at_end_of([finite, top_p]) == ([finite], Truncation(top_p=0.8))


@pytest.mark.parametrize("top_k", [0, 1, MAX_TOP_K_BY_MAXIMA, MAX_TOP_K_BY_MAXIMA + 1, 10**12])
def test_what_a_draw_uses_is_compiled_before(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a draw of the same kind, whose time and memory do not depend on k."""
    compiled: list[int] = []

    def noted(position: int, scores: Any, among: Any, draws: Any) -> int:
        assert len(scores) < 1000
        compiled.append(draws.top_k)
        return 0

    monkeypatch.setattr(top_k_top_p, "draw_row", noted)
    Truncation(top_k=top_k).compile(ExponentialRace(0))
    assert compiled == [top_k if top_k <= MAX_TOP_K_BY_MAXIMA else 0]


def test_a_changed_processor_is_left_to_itself() -> None:
    class Own(TopKLogitsWarper):
        pass

    own = Own(3)
    assert Truncation.at_end_of([own]) == ([own], Truncation())
