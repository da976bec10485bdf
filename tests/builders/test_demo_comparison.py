"""The demo's comparison of plain decoding with drafting: what each answer may know, and how times are summed up."""

from __future__ import annotations

import pytest
import torch

from hdtool.builders.demo.comparison import SideBySide, SpeedUp, median_figures
from hdtool.builders.evaluation.experiment import Row, identical
from hdtool.data import demo
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from tests.support.spec_bench_answers import turn_of

DECODING = DecodeConfig(max_new_tokens=12, draft_tokens=8)


@pytest.fixture(scope="module")
def side_by_side() -> SideBySide:
    loaded = load(ModelConfig())
    stores = StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
    return SideBySide(loaded, StoreSet.for_tokenizer(loaded.tokenizer, stores, DECODING.databases), DECODING)


def test_no_round_learns_from_the_answer_of_an_earlier_one(side_by_side: SideBySide) -> None:
    prompt = read_prompts(demo.PROMPTS)[0]
    once, again = (side_by_side.compare(prompt, rounds) for rounds in (1, 3))
    assert once.same == again.same == 1
    assert once.pieces == again.pieces and once.drafted.stats.steps == again.drafted.stats.steps
    assert not again.drafted.stats.drafted[SourceId.HISTORY]
    assert again.plain.stats.cached_tokens == again.drafted.stats.cached_tokens == 0
    assert again.plain.stats.steps == again.plain.tokens == again.drafted.tokens == 12


def test_both_continue_a_conversation_from_their_caches(side_by_side: SideBySide) -> None:
    first = read_prompts(demo.PROMPTS)[2].messages
    compared = side_by_side.compare(Prompt(first, ("Now the same in another way.",)), rounds=2)
    assert compared.same == 1
    assert compared.plain.stats.cached_tokens == compared.drafted.stats.cached_tokens > 16


def test_a_slow_round_moves_no_median_and_a_different_token_counts() -> None:
    fast, slow, usual = (turn_of([2], wall, cpu_seconds=cpu) for wall, cpu in ((1.0, 1.0), (9.0, 1.2), (1.5, 1.1)))
    figures = median_figures([fast, slow, usual], torch.device("cpu"))
    assert (figures.seconds, figures.cpu_seconds, figures.tokens) == (1.5, 1.1, 2)
    assert median_figures([fast, slow, usual], torch.device("cuda")).cpu_seconds == 1.5
    assert identical([Row("a", 0, 0, (fast,)), Row("b", 0, 0, (slow,))])
    assert not identical([Row("a", 0, 0, (fast,)), Row("b", 0, 0, (turn_of([2], 1.0, first=1),))])


def test_cpu_time_counts_where_the_clock_disagrees() -> None:
    quiet, busy = SpeedUp(1.3, 1.27), SpeedUp(0.8, 1.27)
    assert (quiet.best_known, busy.best_known) == (1.3, 1.27)
    assert busy.is_disturbed and not quiet.is_disturbed
