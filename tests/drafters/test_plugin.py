"""A source that is registered from outside the package: drafted from, weighed, timed, colored, named; and lossless."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hdtool.builders.evaluation.report.plots import THEMES
from hdtool.cli.answer_output import answer_summary, colored, legend
from hdtool.cli.app import run as main
from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.step import Stats
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.drafters.hierarchy.counting_sources import MAX_PLUGIN_POSITIONS
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.kernels.compiled import HAS_CLOCK
from hdtool.runtime.settings import draft_sources
from hdtool.runtime.settings.decoding import DecodeConfig, ReplayConfig
from hdtool.runtime.settings.draft_sources import (
    PLUGINS,
    Source,
    SourceId,
    register,
    registered,
    source_of,
    unregister,
)
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, output_tokens, run
from tests.support.families import model_of
from tests.support.oracle import prompt_of

NO_LOGITS = Verified(torch.empty(0))


def counting(context: Sequence[int]) -> Mapping[int, float]:
    """The next number, and sometimes the one after it."""
    return {context[-1] + 1: 3, context[-1] + 2: 1}


@pytest.fixture
def plugin() -> Iterator[SourceId]:
    number = register(Source("counting", "X", terminal=94, light="#123456", dark="#654321", evidence=counting))
    yield number
    unregister(number)


def drafting(number: SourceId) -> Hierarchy:
    evidence = registered()[number].evidence
    assert evidence
    return Hierarchy(context=False, budget=FixedBudget(12), plugins={number: evidence})


def test_its_chain_becomes_a_path_and_its_other_tokens_branches(plugin: SourceId) -> None:
    hierarchy = drafting(plugin)
    hierarchy.begin([7, 8])
    tree = hierarchy.draft([7, 8])
    assert set(tree.sources.tolist()) == {plugin}
    assert 9 in tree.tokens[tree.parents == -1] and 10 in tree.tokens[tree.parents == -1]
    depths = tree.depths[1:]
    assert all(token - 8 in (depth, depth + 1) for token, depth in zip(tree.tokens, depths, strict=True))
    assert depths.max() <= MAX_PLUGIN_POSITIONS


def test_its_weight_is_learned_and_its_time_measured(plugin: SourceId) -> None:
    right, wrong = drafting(plugin), drafting(plugin)
    context = list(range(10))
    for hierarchy, step in ((right, 1), (wrong, 5)):
        hierarchy.begin(context)
        words = context.copy()
        for _ in range(30):
            hierarchy.draft(words)
            emitted = [words[-1] + step]
            words += emitted
            hierarchy.observe(Accepted([], emitted), NO_LOGITS)
    assert right.weights(SourceId.PLUGIN_1)[0].max() > wrong.weights(SourceId.PLUGIN_1)[0].max()
    assert wrong.weights(SourceId.PLUGIN_1)[0, ::3].min() < right.weights(SourceId.PLUGIN_1)[0, ::3].min()
    if HAS_CLOCK:
        assert right.seconds[plugin] > 0


def test_an_emitted_token_off_the_chain_ends_it(plugin: SourceId) -> None:
    """Weights learn from the evidence that was drafted from, and not from that of another context."""
    hierarchy = drafting(plugin)
    hierarchy.begin([1])
    hierarchy.draft([1])
    before = hierarchy.weights(SourceId.PLUGIN_1)[0].copy()
    hierarchy.observe(Accepted([], [40, 41]), NO_LOGITS)
    once = hierarchy.weights(SourceId.PLUGIN_1)[0].copy()
    assert (once <= before).all() and (once < before).any()
    hierarchy.observe(Accepted([], [42]), NO_LOGITS)
    np.testing.assert_array_equal(hierarchy.weights(SourceId.PLUGIN_1)[0], once)


@pytest.mark.parametrize("found", [{}, {3: float("nan")}, {3: -1.0}, {-5: 1.0, 10**12: 1.0}, {3: 0.0}])
def test_evidence_without_a_usable_token_drafts_nothing(found: dict[int, float]) -> None:
    number = register(Source("odd", "X", evidence=lambda context: found))
    try:
        hierarchy = drafting(number)
        hierarchy.begin([1])
        assert len(hierarchy.draft([1])) == 0
    finally:
        unregister(number)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0, seed=3)], ids=["T 0", "T 1"])
def test_answers_stay_the_same(sampling: SamplingConfig) -> None:
    target = Target(model_of("llama"))
    prompt = prompt_of(20)
    plain = answer_of(target, prompt, sampling, 24)
    answer = [*prompt, *plain]

    def oracle(context: Sequence[int]) -> Mapping[int, float]:
        """Right two times in three."""
        place = len(context)
        return {answer[place] if place % 3 else 1: 0.9} if place < len(answer) else {}

    number = register(Source("oracle", "X", evidence=oracle))
    try:
        config = DecodeConfig(method="hd", draft_tokens=8, sources="oracle")
        drafter = drafter_with_budget(lambda: FixedBudget(8), config, StoreSet(), target)
        stats = Stats()
        steps = list(stats.counted(iter(run(target, prompt, sampling, 24, drafter=drafter)), drafter))
        assert output_tokens(steps) == plain
        assert stats.accepted[number] > 0 and stats.tokens_per_step > 1.2
        assert "\n  oracle: drafted " in answer_summary(stats)
        assert stats.sources_json()["oracle"]["accepted"] == stats.accepted[number]
    finally:
        unregister(number)


def test_it_is_named_and_colored(plugin: SourceId) -> None:
    assert str(plugin) == "counting" and source_of("counting") == plugin
    assert colored("word", plugin) == "\033[94mword\033[0m"
    assert "counting" in legend([plugin])
    assert [theme.source("counting") for theme in THEMES] == ["#123456", "#654321"]


def test_it_is_selected_by_name_or_letter(plugin: SourceId) -> None:
    assert DecodeConfig(sources="context,counting").drafts_from == "CX"
    assert DecodeConfig(sources="CX").sources == ReplayConfig(sources="context,counting").sources == "CX"
    assert "X" not in DecodeConfig().sources
    unregister(plugin)
    with pytest.raises(OptionError, match="counting"):
        DecodeConfig(sources="context,counting")


def test_registration_is_checked(plugin: SourceId) -> None:
    for source in (
        Source("counting", "Y", evidence=counting),
        Source("context", "Y", evidence=counting),
        Source("other", "C", evidence=counting),
        Source("other", "", evidence=counting),
        Source("other", "Y"),
    ):
        with pytest.raises(OptionError):
            register(source)
    more = [register(Source(f"more-{letter}", letter, evidence=counting)) for letter in "YZ"]
    more.append(register(Source("last-one", "W", evidence=counting)))
    assert {plugin, *more} == set(PLUGINS)
    with pytest.raises(OptionError, match="the most"):
        register(Source("too-many", "V", evidence=counting))
    for number in more:
        unregister(number)


def test_replay_reports_it(plugin: SourceId, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = list(range(1000, 1040))
    answer = {"output_ids": ids, "finish": "length"}
    recorded = tmp_path / "traces.jsonl"
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": text_of(load_tokenizer(ModelConfig()), ids)},
    ]
    row = {"id": "one", "category": "x", "messages": messages, "answers": [answer]}
    recorded.write_text(json.dumps(row) + "\n")
    arguments = ["replay", "--traces", str(recorded), "--methods", "hd", "--draft-tokens", "8", "--workers", "1"]
    arguments += ["--sources", "context,counting", "--model-db", "none", "--corpus-db", "none", "--quiet"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["methods"]["hd"]
    assert found["tokens_per_step"] > 2
    assert found["by_source"]["counting"]["accepted"] > 10
    assert main(arguments) == 0
    assert "counting" in capsys.readouterr().out


def test_an_unknown_name_or_letter_is_an_error() -> None:
    assert source_of("C") == source_of("context") == SourceId.CONTEXT
    for unknown in ("weather", "?", ""):
        with pytest.raises(OptionError, match="there is no source"):
            source_of(unknown)


def test_statistics_list_sources_by_their_numbers() -> None:
    stats = Stats()
    stats.source_seconds[[SourceId.HISTORY, SourceId.MODEL, SourceId.CONTEXT]] = 1
    assert stats.sources == [SourceId.CONTEXT, SourceId.MODEL, SourceId.HISTORY]


def test_an_invalid_source_of_a_package_is_named_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Source:
        raise OptionError("the second source is invalid")

    good = Source("first", "Y", terminal=94, light="#123456", dark="#654321", evidence=counting)
    entries = [SimpleNamespace(name=name, value=name, load=load) for name, load in (("a", lambda: good), ("b", fail))]
    monkeypatch.setattr(draft_sources, "entry_points", lambda group: entries)
    monkeypatch.setattr(draft_sources, "_INSTALLED", set())
    draft_sources._register_installed.cache_clear()
    for _ in range(2):
        with pytest.raises(OptionError, match="the second source is invalid"):
            draft_sources.plugins()
    unregister(source_of("first"))
    draft_sources._register_installed.cache_clear()
