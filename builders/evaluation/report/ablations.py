"""Replays for a report: a typical answer, subsets and orders of sources, coverage, and index sizes.

The replays also decide whether claims of the Hierarchy Drafting paper hold for the data.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, compress, permutations
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult
from hdtool.builders.evaluation.report.figures import ReportData
from hdtool.builders.evaluation.report.measurements import ngram_repeats
from hdtool.builders.evaluation.report.tables import (
    Coverage,
    IndexSize,
    IndexSizes,
    SourceCounts,
    SourceCoverage,
    SourceShares,
    Trial,
    Trials,
    TypicalCase,
    source_wins,
)
from hdtool.builders.evaluation.worker_pool import replay
from hdtool.data.conversation import STOPPED
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.documents import Document, Source, stored_documents
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.texts_and_traces import RecordedAnswer, Trace
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import FIXED_BUDGET, SOURCE_LETTERS, DecodeConfig
from hdtool.runtime.config.source_names import SourceId, source_of
from hdtool.runtime.generation.text_stream import TextStream
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet

CASE_LENGTHS = range(60, 301)
"""Lengths, in tokens, of answers that are worth showing and fit a screen."""


def typical_case(
    method: str, result: ReplayResult, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]
) -> TypicalCase:
    """Return the answer whose tokens per step are closest to the average.

    ``questions`` has one entry per turn. Only answers with a length in ``CASE_LENGTHS`` are considered, if there are
    any.
    """
    candidates = list(zip(result.turns, questions, strict=True))
    fitting = [candidate for candidate in candidates if len(candidate[0].tokens) in CASE_LENGTHS] or candidates
    typical, question = min(fitting, key=lambda candidate: abs(candidate[0].tokens_per_step - result.tokens_per_step))
    return TypicalCase(
        method=method,
        question=question,
        pieces=pieces(tokenizer, typical.tokens.tolist(), typical.sources.tolist()),
        tokens=len(typical.tokens),
        steps=len(typical.accept_lengths),
    )


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], sources: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """Return pairs ``(text, source)``: the text that a token completes, and the source that drafted the token."""
    text = TextStream(tokenizer)
    parts = [(text.add([token]), str(SourceId(source))) for token, source in zip(tokens, sources, strict=True)]
    return tuple(piece for piece in (*parts, (text.end(), str(SourceId.NONE))) if piece[0])


HIERARCHIES = ("hd-paper", "hd")


@dataclass(frozen=True)
class Study:
    """Recorded answers, stores to draft from, and settings of a report's replays."""

    conversations: Sequence[Sequence[RecordedTurn]]
    store_set: StoreSet
    budget: int | None = None
    workers: int | None = None
    curve: CostCurve | None = None
    """Cost curve that decides how many draft tokens pay if ``budget`` is None."""

    @property
    def draft_tokens(self) -> str:
        """Phrase that states how many tokens are drafted per step."""
        if self.budget is None and self.curve:
            return "as many draft tokens a step as pay"
        return f"at most {FIXED_BUDGET if self.budget is None else self.budget} draft tokens a step"

    @property
    def letters(self) -> str:
        """Letters of the available sources, in the default lookup order."""
        there = {"C": True, "M": self.store_set.model is not None, "S": self.store_set.corpus is not None}
        return "".join(letter for letter in SOURCE_LETTERS if there[letter])

    @cached_property
    def contenders(self) -> list[ReplayMethod]:
        """``HIERARCHIES`` methods with every source subset, and ``hd-paper`` also with all sources in every order."""
        choices = [(method, chosen) for method in HIERARCHIES for chosen in source_subsets(self.letters)]
        choices += [("hd-paper", order) for order in source_orders(self.letters)]
        return [self.contender(*choice) for choice in dict.fromkeys(choices)]

    def contender(self, method: str, sources: str) -> ReplayMethod:
        """Return ``method``, set up to draft from ``sources`` in the given order."""
        order = sources + "".join(letter for letter in SOURCE_LETTERS if letter not in sources)
        config = DecodeConfig(method, draft_tokens=self.budget, sources=sources, order=order, lookahead=False)
        return ReplayMethod(_replay_name(method, sources), config, self.curve)

    @property
    def turns(self) -> int:
        """Total number of turns in all replays."""
        return len(self.contenders) * sum(map(len, self.conversations))

    def results(self, on_progress: Callable[[int], None] = lambda done: None) -> StudyResults:
        """Run all replays; ``on_progress`` receives the number of turns done so far."""
        replayed = replay(
            self.contenders, self.conversations, self.store_set, workers=self.workers, on_progress=on_progress
        )
        return StudyResults(self.letters, replayed)


@dataclass(frozen=True)
class StudyResults:
    """Results of all replays, converted to the data of figures."""

    letters: str
    results: Mapping[str, ReplayResult]

    def whole(self, method: str) -> ReplayResult:
        """Return the replay of ``method`` with all available sources."""
        return self.results[_replay_name(method, self.letters)]

    def shares(self) -> tuple[SourceShares, ...]:
        return tuple(source_shares(method, self.whole(method)) for method in HIERARCHIES)

    def subsets(self) -> tuple[Trials, ...]:
        return tuple(self._trials(method, source_subsets(self.letters)) for method in HIERARCHIES)

    def orders(self) -> Trials | None:
        """Return the replays with all sources, one per lookup order; None if there is only one source."""
        return self._trials("hd-paper", source_orders(self.letters)) if len(self.letters) > 1 else None

    def coverage(self) -> tuple[Coverage, ...]:
        if len(self.letters) < 2:
            return ()
        return tuple(
            source_coverage(method, {letter: self.results[_replay_name(method, letter)] for letter in self.letters})
            for method in HIERARCHIES
        )

    def _trials(self, method: str, choices: Sequence[str]) -> Trials:
        choices_and_results = ((choice, self.results[_replay_name(method, choice)]) for choice in choices)
        rows = (
            Trial(choice_name, result.tokens_per_step, result.nodes_per_step, result.draft_us(50))
            for choice_name, result in choices_and_results
        )
        return Trials(method, tuple(rows))


def source_subsets(letters: str) -> tuple[str, ...]:
    """Return all non-empty subsets of ``letters``, ordered by size."""
    return tuple(
        "".join(letters_chosen) for size in range(1, len(letters) + 1) for letters_chosen in combinations(letters, size)
    )


def source_orders(letters: str) -> tuple[str, ...]:
    return tuple(map("".join, permutations(letters)))


def _replay_name(method: str, sources: str) -> str:
    return f"{method} {sources}"


def source_shares(method: str, result: ReplayResult) -> SourceShares:
    counts = result.by_source().items()
    wins = Counter[int]()
    for turn in result.turns:
        wins += source_wins(turn.sources.tolist(), turn.accept_lengths.tolist())
    sources = {
        str(name): SourceCounts(count.drafted, count.accepted, count.hits, wins[name])
        for name, count in counts
        if count.drafted
    }
    return SourceShares(method, result.drafted_steps, sources)


def source_coverage(method: str, singles: Mapping[str, ReplayResult]) -> Coverage:
    """Count, per source, the tokens accepted when it alone drafts, and those accepted from no other source.

    ``singles`` are the replays of ``method`` with one source each, by source letter.
    """
    tokens = np.concatenate([turn.tokens for turn in next(iter(singles.values())).turns])
    accepted = {
        letter: np.concatenate([turn.sources for turn in result.turns]) == source_of(letter)
        for letter, result in singles.items()
    }
    count = np.sum(list(accepted.values()), axis=0)
    distinct_tokens = {letter: set(tokens[accepted_tokens].tolist()) for letter, accepted_tokens in accepted.items()}
    covered = {}
    for letter, accepted_tokens in accepted.items():
        others = set[int]().union(
            *(tokens_of_other for other, tokens_of_other in distinct_tokens.items() if other != letter)
        )
        covered[str(source_of(letter))] = SourceCoverage(
            positions=int(accepted_tokens.sum()),
            alone=int((accepted_tokens & (count == 1)).sum()),
            distinct_tokens=len(distinct_tokens[letter]),
            distinct_tokens_alone=len(distinct_tokens[letter] - others),
        )
    return Coverage(method, len(tokens), covered, unaccepted=int((count == 0).sum()))


THINNING_FACTORS = (16, 8, 4, 2)
"""Factors by which the smaller indexes hold fewer documents than the corpus index."""
MAX_INDEX_TOKENS = 50_000_000
"""Size of a corpus index, in tokens, above which building the smaller indexes would take minutes."""
MIN_INDEX_DOCUMENTS = 10 * THINNING_FACTORS[0]
SIZES_METHOD = "hd"


BuildIndex = Callable[[Path, Iterable[Document], TokenizerFingerprint, Sequence[Source]], object]
"""Builds a corpus index in a folder."""


def replay_sizes(study: Study, build: BuildIndex, *, quiet: bool = False) -> IndexSizes | str:
    """Replay with the corpus index and with smaller parts of it; return the results, or why there are none."""
    corpus = study.store_set.corpus
    if corpus is None:
        return "there is no corpus index"
    counts = corpus.manifest.counts
    if counts["tokens"] > MAX_INDEX_TOKENS:
        return (
            f"the corpus index holds {counts['tokens']:,} tokens, and at most {MAX_INDEX_TOKENS:,} are supported here"
        )
    if counts["documents"] < MIN_INDEX_DOCUMENTS:
        return f"the corpus index holds {counts['documents']} documents, and at least {MIN_INDEX_DOCUMENTS} are needed"
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        progress_bar(len(THINNING_FACTORS) + 1, "replays with less corpus", unit="sizes", quiet=quiet) as progress,
    ):
        for part in THINNING_FACTORS:
            rows.append(_size(study, _thinned_index(corpus, part, Path(scratch) / str(part), build)))
            progress.advance()
        rows.append(_size(study, corpus))
        progress.advance()
    return IndexSizes(SIZES_METHOD, tuple(rows))


def _thinned_index(corpus: CorpusIndex, part: int, folder: Path, build: BuildIndex) -> CorpusIndex:
    """Build an index of a random sample of the documents, each of which is drawn with probability ``1 / part``.

    The sample is random because many corpora alternate questions and answers.
    """
    manifest = corpus.manifest
    stored = stored_documents(corpus.documents, corpus.end)
    drawn = np.random.default_rng(0).random(manifest.counts["documents"]) < 1 / part
    documents = (Document(tokens) for tokens in compress(stored, drawn))
    build(folder, documents, manifest.tokenizer, [Source("a part of another index", "")])
    return CorpusIndex(folder)


def _size(study: Study, corpus: CorpusIndex) -> IndexSize:
    store_set = StoreSet(study.store_set.model, corpus)
    contender = study.contender(SIZES_METHOD, study.letters)
    # Replay in one process, because times are reported.
    result = replay([contender], study.conversations, store_set, workers=1)[contender.name]
    return IndexSize(
        tokens=corpus.manifest.counts["tokens"],
        tokens_per_step=result.tokens_per_step,
        draft_us=result.draft_us(50),
        draft_us_p90=result.draft_us(90),
        corpus_us=result.source_seconds.get(SourceId.CORPUS, 0.0) / result.drafted_steps * 1e6,
    )


def report_data(
    study: Study, traces: Sequence[Trace], tokenizer: PreTrainedTokenizerBase, *, build: BuildIndex, quiet: bool = False
) -> ReportData:
    """Run the replays of ``study`` and return the data of all figures; ``traces`` are its conversations as text."""
    with progress_bar(study.turns, "replays for the report", unit="turns", quiet=quiet) as progress:
        study_results = study.results(progress.to)
    questions = [trace.messages[answer.message_index - 1]["content"] for trace in traces for answer in trace.answers]
    return ReportData(
        shares=study_results.shares(),
        subsets=study_results.subsets(),
        orders=study_results.orders(),
        coverage=study_results.coverage(),
        repeats=ngram_repeats(study.conversations, study.store_set),
        sizes=replay_sizes(study, build, quiet=quiet),
        case=typical_case("hd", study_results.whole("hd"), tokenizer, questions),
    )


def bench_traces(questions: Sequence[Prompt], answers: Sequence[AnsweredQuestion]) -> list[Trace]:
    """Return a benchmark's questions and one method's answers as traces, skipping unanswered questions."""
    pairs = zip(questions, answers, strict=False)  # a benchmark may be incomplete
    traces = (_trace(question, answered) for question, answered in pairs)
    return [trace for trace in traces if trace.answers]


def _trace(question: Prompt, answered: AnsweredQuestion) -> Trace:
    turns = [turn for turn in answered.turns if turn.output_ids]  # turns are empty once the context is full
    end = len(question.messages) + 2 * len(turns) - 1
    messages = question.conversation([turn.text for turn in turns])[:end]
    places = range(len(question.messages), end, 2)
    recorded = tuple(
        RecordedAnswer(place, tuple(turn.output_ids), None if turn.finish == STOPPED else len(turn.output_ids))
        for place, turn in zip(places, turns, strict=True)
    )
    return Trace(question.id, question.category, tuple(messages), recorded, f"question {question.id}")


PAPER_SOURCES = ("context", "model", "corpus")
PAPER_METHOD = "hd-paper"
"""Method whose replays decide the verdict; evidence from other methods is listed too."""


@dataclass(frozen=True)
class ClaimFinding:
    """Claim of the Hierarchy Drafting paper, and whether the report's data supports it."""

    claim: str
    holds: bool
    evidence: tuple[str, ...]
    """One line per method."""

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "does not hold"


def claim_findings(
    shares: Sequence[SourceShares], coverage: Sequence[Coverage], subsets: Sequence[Trials], orders: Trials | None
) -> tuple[ClaimFinding, ...]:
    """Return a finding for each claim that the data decides; most claims need all three sources."""
    claims = {
        "C > M > S in verify success": _verify_success(shares),
        "each source accepts tokens that no other does": _unique_tokens(coverage),
        "C+M beats any single source": _pair_beats_singles(subsets),
        "the order C, M, S is the best of the six": _best_order(orders),
    }
    return tuple(finding for claim, rows in claims.items() if (finding := _finding(claim, rows)))


def _finding(claim: str, evidence_rows: Iterator[tuple[str, bool, str]]) -> ClaimFinding | None:
    verdicts = {method: (holds, evidence) for method, holds, evidence in evidence_rows}
    if not verdicts:
        return None
    paper_first = sorted(verdicts.items(), key=lambda item: item[0] != PAPER_METHOD)
    holds = paper_first[0][1][0]
    lines = (
        f"{method}: {evidence}{'' if own == holds else ' (differs from above)'}"
        for method, (own, evidence) in paper_first
    )
    return ClaimFinding(claim, holds, tuple(lines))


def _verify_success(shares: Sequence[SourceShares]) -> Iterator[tuple[str, bool, str]]:
    for share in shares:
        sources = [
            share.sources[name] for name in PAPER_SOURCES if name in share.sources and share.sources[name].drafted
        ]
        if len(sources) < len(PAPER_SOURCES):
            continue
        counts = {
            "steps in which something of it was accepted, of those that it drafted in": [
                one.win_rate for one in sources
            ],
            "accepted of the tokens that it drafted": [one.acceptance_rate for one in sources],
        }
        values = "; ".join(f"{what}: {_values_by_source(rates, '.1%')}" for what, rates in counts.items())
        yield share.method, all(rates[0] > rates[1] > rates[2] for rates in counts.values()), values


def _values_by_source(values: Sequence[float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in zip(PAPER_SOURCES, values, strict=True))


def _unique_tokens(coverage: Sequence[Coverage]) -> Iterator[tuple[str, bool, str]]:
    for covered in coverage:
        alone = [covered.sources[name].alone for name in PAPER_SOURCES if name in covered.sources]
        if len(alone) == len(PAPER_SOURCES):
            values = (
                f"of {covered.positions:,} tokens, accepted from this source alone: {_values_by_source(alone, ',')}"
            )
            yield covered.method, min(alone) > 0, values


def _pair_beats_singles(subsets: Sequence[Trials]) -> Iterator[tuple[str, bool, str]]:
    for trials in subsets:
        rates = {row.sources: row.tokens_per_step for row in trials.rows}
        if {"C", "M", "S", "CM"} <= rates.keys():
            values = ", ".join(f"{'+'.join(name)} {rates[name]:.3f}" for name in ("CM", "C", "M", "S"))
            yield trials.method, all(rates["CM"] > rates[name] for name in "CMS"), f"tokens per step: {values}"


def _best_order(orders: Trials | None) -> Iterator[tuple[str, bool, str]]:
    if orders is None or len(orders.rows) < 6:
        return
    ranked = sorted(orders.rows, key=lambda row: -row.tokens_per_step)
    values = ", ".join(f"{row.sources} {row.tokens_per_step:.3f} ({row.draft_us:.0f} µs)" for row in ranked)
    best = ranked[0].sources == "CMS" and ranked[0].tokens_per_step > ranked[1].tokens_per_step
    yield orders.method, best, f"tokens per step (drafting, median of the steps): {values}"
