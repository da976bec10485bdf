"""What a report finds out: subsets and orders, coverage, repeats, sizes, findings, against plain counting."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayedTurn, ReplayResult
from hdtool.builders.evaluation.report import ablations as sizes_of_corpora
from hdtool.builders.evaluation.report.ablations import (
    Study,
    bench_traces,
    claim_findings,
    pieces,
    replay_sizes,
    source_coverage,
    source_orders,
    source_shares,
    source_subsets,
    typical_case,
)
from hdtool.builders.evaluation.report.measurements import (
    BenchMeasurements,
    ngram_hashes,
    ngram_repeats,
    repeat_distances,
    repeated_in_context,
)
from hdtool.builders.evaluation.report.tables import (
    Coverage,
    SourceCounts,
    SourceCoverage,
    SourceShares,
    Trial,
    Trials,
    source_wins,
)
from hdtool.builders.stores.build import build_corpus_index
from hdtool.builders.stores.build_engine import LocalBuildEngine
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.bench_results import BenchRun, Results
from hdtool.data.documents import Document, Source
from hdtool.data.prompts import Prompt
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_tokenizer
from tests.support.spec_bench_answers import answered, turn_of

SHELF = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))


def turn(prompt: list[int], answer: list[int], conversation: str = "1") -> RecordedTurn:
    return RecordedTurn(conversation, "", 0, prompt, answer)


def played_turn(tokens: list[int], sources: list[int], steps: list[int] | None = None) -> ReplayedTurn:
    steps = steps or [1] * len(tokens)
    nothing = np.zeros(len(steps))
    drafted = np.bincount(sources, minlength=len(SourceId))
    return ReplayedTurn(
        "1", "", 0, 3, np.array(tokens), np.array(sources, np.uint8), np.array(steps), nothing.astype(int),
        nothing, nothing, drafted, (drafted > 0).astype(int),
    )  # fmt: skip


# Which replays ---------------------------------------------------------------------------------


def test_subsets_and_orders() -> None:
    assert source_subsets("CMS") == ("C", "M", "S", "CM", "CS", "MS", "CMS")
    assert source_subsets("CM") == ("C", "M", "CM")
    assert source_orders("CMS") == ("CMS", "CSM", "MCS", "MSC", "SCM", "SMC")
    assert source_orders("C") == ("C",)


def test_both_hierarchies_are_played_with_every_choice_and_the_paper_in_every_order() -> None:
    study = Study([[turn([1], [2])]], SHELF, budget=7)
    names = [contender.name for contender in study.contenders]
    assert len(names) == len(set(names)) == 7 + 7 + 5 == study.turns
    by_name = {contender.name: contender.config for contender in study.contenders}
    assert by_name["hd CS"].sources == "CS" and by_name["hd CS"].method == "hd"
    assert by_name["hd-paper SMC"].order == "SMC" and by_name["hd-paper SMC"].sources == "SMC"
    assert by_name["hd-paper MS"].order == "MSC" and by_name["hd-paper MS"].sources == "MS"
    assert all(config.draft_tokens == 7 and not config.lookahead for config in by_name.values())


def test_a_source_that_is_not_there_is_in_no_choice() -> None:
    study = Study([], StoreSet(SHELF.model, None))
    assert study.letters == "CM"
    assert [one.name for one in study.contenders if one.name.startswith("hd ")] == ["hd C", "hd M", "hd CM"]
    assert Study([], StoreSet()).letters == "C"


def test_a_study_of_the_demo_agrees_with_itself() -> None:
    answer = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 11]
    found = Study([[turn([5, 6], answer)]], SHELF, workers=1).results()
    alone, in_order = {row.sources: row for row in found.subsets()[0].rows}, found.orders()
    assert in_order is not None
    assert alone["CMS"] == next(row for row in in_order.rows if row.sources == "CMS")
    assert alone["C"].tokens_per_step > alone["M"].tokens_per_step, "the answer repeats itself alone"
    (paper, own) = found.coverage()
    assert paper.positions == own.positions == len(answer)
    assert own.sources["context"].alone > 0


# What they come to -----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), *[st.booleans()] * 3), min_size=1, max_size=40))
def test_coverage_is_what_sets_say(rows: list[tuple[int, bool, bool, bool]]) -> None:
    letters = {"C": SourceId.CONTEXT, "M": SourceId.MODEL, "S": SourceId.CORPUS}
    tokens = [row[0] for row in rows]
    singles = {
        letter: ReplayResult("hd", (played_turn(tokens, [int(source) * row[place] for row in rows]),), {})
        for place, (letter, source) in enumerate(letters.items(), start=1)
    }
    found = source_coverage("hd", singles)
    places = {letter: {at for at, row in enumerate(rows) if row[place]} for place, letter in enumerate("CMS", start=1)}
    words = {letter: {tokens[at] for at in own} for letter, own in places.items()}
    for letter, own in places.items():
        rest = set(chain.from_iterable(places[other] for other in "CMS" if other != letter))
        said = set(chain.from_iterable(words[other] for other in "CMS" if other != letter))
        expected = SourceCoverage(len(own), len(own - rest), len(words[letter]), len(words[letter] - said))
        assert found.sources[str(letters[letter])] == expected
    assert found.unaccepted == len(rows) - len(set.union(*places.values()))


def test_shares_are_of_the_steps_that_could_be_drafted_for() -> None:
    one = played_turn([1, 2, 3, 4], [0, 1, 1, 0], [1, 3])
    shares = source_shares("hd", ReplayResult("hd", (one,), {SourceId.MODEL: 0.1}))
    assert shares.steps == 1
    assert shares.sources == {"context": SourceCounts(2, 2, 1, 1)}, "what only took time drafted nothing"


def test_a_benchmark_has_the_shares_of_its_answers() -> None:
    sources = {"context": {"drafted": 9, "accepted": 3, "hits": 2}, "model": {"drafted": 4, "accepted": 0, "hits": 1}}
    one = answered("a", "qa", turn_of([1, 3, 2], 1.0, drafted_by=[0, 1, 1, 0, 1, 0], sources=sources))
    run = BenchRun({"temperature": 0.0}, ("ar", "hd"), 1, {}, "now")
    (found,) = BenchMeasurements(
        Results(run, {"ar": [answered("a", "qa", turn_of([1] * 6, 2.0))], "hd": [one]})
    ).shares()
    assert found == SourceShares("hd", 2, {"context": SourceCounts(9, 3, 2, 2), "model": SourceCounts(4, 0, 1, 0)})


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_a_source_wins_a_step_once(steps: list[list[int]]) -> None:
    found = source_wins(list(chain.from_iterable(steps)), [len(step) for step in steps])
    assert found == {source: sum(source in step for step in steps) for source in set(chain.from_iterable(steps))}


ORDERS = {"CMS": 2.0, "CSM": 1.9, "MCS": 1.8, "MSC": 1.7, "SCM": 1.6, "SMC": 1.5}


def verdicts(
    verified: tuple[int, int, int] = (30, 20, 10),
    won: tuple[int, int, int] = (6, 4, 2),
    alone: tuple[int, int, int] = (3, 2, 1),
    subsets: dict[str, float] | None = None,
    orders: dict[str, float] | None = None,
) -> dict[str, Any]:
    names = ("context", "model", "corpus")
    taken = {name: SourceCounts(100, *counts) for name, *counts in zip(names, verified, (9, 9, 9), won, strict=True)}
    shares = SourceShares("hd-paper", 9, taken)
    covered = {name: SourceCoverage(9, count, 5, 1) for name, count in zip(names, alone, strict=True)}
    rates = subsets or {"C": 1.5, "M": 1.4, "S": 1.6, "CM": 1.7}
    trials = Trials("hd-paper", tuple(Trial(name, rate, 1, 1) for name, rate in rates.items()))
    tried = Trials("hd-paper", tuple(Trial(name, rate, 1, 1) for name, rate in (orders or ORDERS).items()))
    found = claim_findings([shares], [Coverage("hd-paper", 20, covered, 1)], [trials], tried)
    return dict(zip(("success", "own", "pair", "order"), (one.holds for one in found), strict=True))


def test_findings_hold_where_the_numbers_do() -> None:
    assert verdicts() == dict.fromkeys(("success", "own", "pair", "order"), True)


@pytest.mark.parametrize(
    "claim, changed",
    [
        ("success", {"verified": (30, 10, 20)}),
        ("success", {"verified": (20, 20, 10)}),
        ("success", {"won": (6, 7, 2)}),
        ("own", {"alone": (3, 0, 1)}),
        ("pair", {"subsets": {"C": 1.5, "M": 1.4, "S": 1.7, "CM": 1.7}}),
        ("order", {"orders": ORDERS | {"CSM": 2.0}}),
    ],
)
def test_a_finding_falls_with_one_number(claim: str, changed: dict[str, Any]) -> None:
    found = verdicts(**changed)
    assert found.pop(claim) is False
    assert all(found.values())


def test_what_cannot_be_told_is_no_finding() -> None:
    lacking = SourceShares("hd", 9, {"context": SourceCounts(9, 5, 9, 5), "model": SourceCounts(9, 4, 9, 4)})
    assert claim_findings([lacking], [], [Trials("hd", (Trial("C", 1.0, 1, 1),))], None) == ()
    unequal = [
        SourceShares(name, 9, {**lacking.sources, "corpus": SourceCounts(9, last, 9, last)})
        for name, last in (("hd", 3), ("hd-paper", 8))
    ]
    (success,) = claim_findings(unequal, [], [], None)
    assert success.holds is False, "the verdict is about the paper's own policy"
    assert success.evidence[0].startswith("hd-paper:") and success.evidence[1].endswith("(differs from above)")


# Repeats ---------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2), max_size=14)


@given(tokens, tokens)
def test_repeats_in_a_conversation_are_what_searching_finds(prompt: list[int], answer: list[int]) -> None:
    whole = prompt + answer
    expected = []
    for at in range(len(prompt), len(whole) - 3):
        earlier = [whole[place : place + 4] for place in range(at)]
        expected.append(whole[at : at + 4] in earlier)
    assert repeated_in_context(turn(prompt, answer)).tolist() == expected


@given(st.lists(tokens, min_size=1, max_size=4))
def test_distances_are_what_searching_finds(answers: list[list[int]]) -> None:
    said: list[tuple[int, tuple[int, ...]]] = []
    start = 0
    for answer in answers:
        said += [(start + at, tuple(answer[at : at + 4])) for at in range(len(answer) - 3)]
        start += max(len(answer), 3)
    expected = []
    for number, (place, gram) in enumerate(said):
        before = [other for other, same in said[:number] if same == gram]
        expected += [place - before[-1]] if before else []
    assert sorted(repeat_distances([ngram_hashes(answer) for answer in answers]).tolist()) == sorted(expected)


def test_repeats_know_earlier_answers_and_stores(tmp_path: Path) -> None:
    mark = TokenizerFingerprint("a", 100)
    documents = [Document([50, 51, 52, 53]), Document([60, 61]), Document([62, 63])]
    build_corpus_index(tmp_path, documents, mark, [Source("text", "")], engine=LocalBuildEngine(1))
    first, second = turn([1], [10, 11, 12, 13, 14]), turn([1], [50, 51, 52, 53, 60, 61, 62, 63], "2")
    again = turn([1], [10, 11, 12, 13, 99], "2")
    found = ngram_repeats([[first], [second, again]], StoreSet(None, CorpusIndex(tmp_path)))
    assert found is not None
    assert found.generations == (1, 2, 3)
    assert found.origins["earlier answers"] == (0.0, 0.0, 0.5)
    assert found.origins["corpus index"] == (0.0, 0.2, 0.0), "a document ends where it ends"
    assert found.origins["none of them"] == (1.0, 0.8, 0.5)
    assert found.shares_within[-1] == pytest.approx(1 / 9)
    assert ngram_repeats([[turn([1, 2, 3], [4, 5])]], StoreSet()) is None


# Sizes, cases, recordings ----------------------------------------------------------------------


def test_sizes_say_why_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay_sizes(Study([], StoreSet()), build_corpus_index) == "there is no corpus index"
    mark = TokenizerFingerprint("a", 100)
    build_corpus_index(tmp_path, [Document([1, 2])], mark, [Source("text", "")], engine=LocalBuildEngine(1))
    assert "holds 1 documents" in str(
        replay_sizes(Study([], StoreSet(None, CorpusIndex(tmp_path))), build_corpus_index)
    )
    monkeypatch.setattr(sizes_of_corpora, "MAX_INDEX_TOKENS", 1)
    assert "at most 1 are supported here" in str(
        replay_sizes(Study([], StoreSet(None, CorpusIndex(tmp_path))), build_corpus_index)
    )


def test_smaller_corpora_are_parts_of_larger_ones(tmp_path: Path) -> None:
    mark = TokenizerFingerprint("a", 1000)
    documents = [Document([at, at, at]) for at in range(400)]
    build_corpus_index(tmp_path, documents, mark, [Source("text", "")], engine=LocalBuildEngine(1))
    answer = [5, 5, 5, 6, 6, 6]
    study = Study([[turn([1], answer)]], StoreSet(None, CorpusIndex(tmp_path)))
    found = replay_sizes(study, build_corpus_index)
    assert not isinstance(found, str)
    counts = [row.tokens for row in found.rows]
    assert counts == sorted(set(counts)) and counts[-1] == 1200 and len(counts) == 5
    assert abs(counts[-2] - 600) < 150


def test_a_case_is_the_answer_nearest_to_the_mean() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    ids = tokenizer("The quick brown fox jumps over the lazy dog, twice. " * 8)["input_ids"][:60]
    turns = tuple(
        played_turn(ids, [0] * 60, [60 // count] * count) for count in (60, 30, 10)
    )  # 1, 2 and 6 a step: 1.8 of all
    case = typical_case("hd", ReplayResult("hd", turns, {}), tokenizer, ["first", "second", "third"])
    assert (case.question, case.tokens, case.steps) == ("second", 60, 30)
    assert "".join(text for text, _ in case.pieces) == text_of(tokenizer, ids)
    named = pieces(tokenizer, ids[1:4], [0, 1, 3])  # the first has no text
    assert [source for _, source in named] == ["none", "context", "corpus"]


def test_a_benchmarks_answers_are_conversations() -> None:
    prompt = Prompt(({"role": "user", "content": "one"},), ("two", "three"), "7", "qa")
    cut = turn_of([2, 2], 1.0)
    row = answered(7, "qa", turn_of([1, 2], 1.0), cut.__class__(**{**cut.__dict__, "finish": "length"}))
    (trace,) = bench_traces([prompt, prompt], [row])
    assert [message["content"] for message in trace.messages] == ["one", "[0, 1, 2]", "two", "[0, 1, 2, 3]"]
    assert [(one.message_index, one.ids, one.max_tokens) for one in trace.answers] == [
        (1, (0, 1, 2), None),
        (3, (0, 1, 2, 3), 4),
    ]
    silent = answered(7, "qa", turn_of([], 0.0))
    assert bench_traces([prompt], [silent]) == []


# The commands ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_replay_makes_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one two " * 40}]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n", encoding="utf-8")
    out = tmp_path / "report"
    arguments = ["replay", "--traces", str(tmp_path / "traces.jsonl"), "--report", str(out), "--quiet"]
    assert run([*arguments, "--methods", "pld,hd", "--model-db", "none", "--corpus-db", "none"]) == 0
    assert f"report: {out / 'index.html'}" in capfd.readouterr().err
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "1 conversations, 1 answers" in page and "there is no corpus index" in page
    assert {path.name for path in out.glob("*.png") if ".dark" not in path.name} >= {
        "sources-hd.png",
        "subsets-hd.png",
        "repeated-4-grams.png",
    }


@pytest.mark.long
def test_a_benchmark_makes_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    quick = ["--num-prompts", "2", "--max-new-tokens", "6", "--warm-up", "0", "--quiet", "--methods", "ar,pld"]
    stores = ["--model-db", "none", "--corpus-db", "none", "--out", str(tmp_path / "bench")]
    assert run(["bench", *quick, *stores, "--temperatures", "0,0.7", "--report", str(out)]) == 0, capfd.readouterr()
    names = {path.name for path in out.glob("*.png") if ".dark" not in path.name}
    assert names >= {"speed-up.png", "generation-time.png", "temperatures.png"}
    assert [path.name for path in (tmp_path / "bench").iterdir() if path.is_dir()] == ["temperature-0.7"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--temperatures", "0.5"], "--temperatures has no effect without --report"),
        (["--temperatures", "0.5,hot", "--report", "r"], "numbers separated by commas"),
        (["--temperatures", "-1", "--report", "r"], "--temperature must be 0 (greedy) or more, got -1.0"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], complaint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 2
    assert complaint in capfd.readouterr().err


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["bench", "--report", str(tmp_path / "file"), "--out", str(tmp_path / "bench")]) == 1
    assert "choose another --report" in capfd.readouterr().err
    assert not (tmp_path / "bench").exists()


def test_replays_of_sources_have_no_history() -> None:
    """Their subject is the sources alone, and conversations are replayed many times."""
    study = Study([], StoreSet())
    assert not any(contender.has_history for contender in study.contenders)
    assert not study.contender("hd", "CMS").has_history
