"""The part of a report that is computed from recorded answers, without the model."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, compress, permutations
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import Contender, ReplayResult
from hdtool.builders.evaluation.report.figures import ReportData
from hdtool.builders.evaluation.report.measurements import repeats
from hdtool.builders.evaluation.report.tables import (
    Case,
    Coverage,
    Covered,
    Share,
    Shares,
    Size,
    Sizes,
    Trial,
    Trials,
    wins_of,
)
from hdtool.builders.evaluation.worker_pool import replay
from hdtool.data.conversation import STOPPED
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.progress import bar
from hdtool.data.prompts import Prompt
from hdtool.data.records import Recorded, Trace
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_files import Document, Source, stored_documents
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import FIXED_BUDGET, SOURCE_LETTERS, DecodeConfig
from hdtool.runtime.source_names import SourceName, source_of
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.text_stream import TextStream

LENGTHS = range(60, 301)
"""Tokens of an answer that is worth showing and fits a screen."""


def case_of(method: str, result: ReplayResult, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> Case:
    """The answer whose tokens per step are nearest to the average; ``questions`` has one entry per turn."""
    every = list(zip(result.turns, questions, strict=True))
    fit = [one for one in every if len(one[0].tokens) in LENGTHS] or every
    typical, question = min(fit, key=lambda one: abs(one[0].tokens_per_step - result.tokens_per_step))
    return Case(
        method=method,
        question=question,
        pieces=pieces(tokenizer, typical.tokens.tolist(), typical.sources.tolist()),
        tokens=len(typical.tokens),
        steps=len(typical.accept_lengths),
    )


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], sources: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """The text that each token completes, and the source that drafted the token."""
    text = TextStream(tokenizer)
    parts = [(text.add([token]), str(SourceName(source))) for token, source in zip(tokens, sources, strict=True)]
    return tuple(piece for piece in (*parts, (text.end(), str(SourceName.NONE))) if piece[0])


HIERARCHIES = ("hd-paper", "hd")


@dataclass(frozen=True)
class Study:
    """Recorded answers, the stores to draft from, and the number of draft tokens per step."""

    conversations: Sequence[Sequence[RecordedTurn]]
    store_set: StoreSet
    budget: int | None = None
    workers: int | None = None
    curve: CostCurve | None = None
    """Decides how many draft tokens pay where no number is given."""

    @property
    def draft_tokens(self) -> str:
        """The draft tokens of a step, in words."""
        if self.budget is None and self.curve:
            return "as many draft tokens a step as pay"
        return f"at most {FIXED_BUDGET if self.budget is None else self.budget} draft tokens a step"

    @property
    def letters(self) -> str:
        """The letters of the available sources."""
        there = {"C": True, "M": self.store_set.model is not None, "S": self.store_set.corpus is not None}
        return "".join(letter for letter in SOURCE_LETTERS if there[letter])

    @cached_property
    def contenders(self) -> list[Contender]:
        """Both hierarchies with every subset of sources, ``hd-paper`` also in every order."""
        choices = [(method, chosen) for method in HIERARCHIES for chosen in subsets_of(self.letters)]
        choices += [("hd-paper", order) for order in orders_of(self.letters)]
        return [self.contender(*choice) for choice in dict.fromkeys(choices)]

    def contender(self, method: str, sources: str) -> Contender:
        """A method with these sources, in this order of look-up."""
        order = sources + "".join(letter for letter in SOURCE_LETTERS if letter not in sources)
        config = DecodeConfig(method, draft_tokens=self.budget, sources=sources, order=order, lookahead=False)
        return Contender(_name(method, sources), config, self.curve)

    @property
    def turns(self) -> int:
        """The number of turns over all replays."""
        return len(self.contenders) * sum(map(len, self.conversations))

    def results(self, on_progress: Callable[[int], None] = lambda done: None) -> StudyResults:
        """Run all replays; ``on_progress`` receives the number of turns done so far."""
        played = replay(
            self.contenders, self.conversations, self.store_set, workers=self.workers, on_progress=on_progress
        )
        return StudyResults(self.letters, played)


@dataclass(frozen=True)
class StudyResults:
    """The results of the replays, as data of figures."""

    letters: str
    results: Mapping[str, ReplayResult]

    def whole(self, method: str) -> ReplayResult:
        """The replay with all available sources."""
        return self.results[_name(method, self.letters)]

    def shares(self) -> tuple[Shares, ...]:
        return tuple(shares_of(method, self.whole(method)) for method in HIERARCHIES)

    def subsets(self) -> tuple[Trials, ...]:
        return tuple(self._trials(method, subsets_of(self.letters)) for method in HIERARCHIES)

    def orders(self) -> Trials | None:
        """None if there is only one source."""
        return self._trials("hd-paper", orders_of(self.letters)) if len(self.letters) > 1 else None

    def coverage(self) -> tuple[Coverage, ...]:
        if len(self.letters) < 2:
            return ()
        return tuple(
            coverage_of(method, {letter: self.results[_name(method, letter)] for letter in self.letters})
            for method in HIERARCHIES
        )

    def _trials(self, method: str, choices: Sequence[str]) -> Trials:
        found = ((choice, self.results[_name(method, choice)]) for choice in choices)
        rows = (Trial(one, done.tokens_per_step, done.nodes_per_step, done.draft_us(50)) for one, done in found)
        return Trials(method, tuple(rows))


def subsets_of(letters: str) -> tuple[str, ...]:
    """The smaller ones first."""
    return tuple("".join(some) for size in range(1, len(letters) + 1) for some in combinations(letters, size))


def orders_of(letters: str) -> tuple[str, ...]:
    return tuple(map("".join, permutations(letters)))


def _name(method: str, sources: str) -> str:
    return f"{method} {sources}"


def shares_of(method: str, result: ReplayResult) -> Shares:
    counts = result.by_source().items()
    wins = Counter[int]()
    for turn in result.turns:
        wins += wins_of(turn.sources.tolist(), turn.accept_lengths.tolist())
    sources = {str(name): Share(one.drafted, one.accepted, one.hits, wins[name]) for name, one in counts if one.drafted}
    return Shares(method, result.drafted_steps, sources)


def coverage_of(method: str, singles: Mapping[str, ReplayResult]) -> Coverage:
    """The tokens accepted from each source as the only one, and those that no other had."""
    tokens = np.concatenate([turn.tokens for turn in next(iter(singles.values())).turns])
    accepted = {
        letter: np.concatenate([turn.sources for turn in result.turns]) == source_of(letter)
        for letter, result in singles.items()
    }
    count = np.sum(list(accepted.values()), axis=0)
    words = {letter: set(tokens[own].tolist()) for letter, own in accepted.items()}
    covered = {}
    for letter, own in accepted.items():
        others = set[int]().union(*(found for other, found in words.items() if other != letter))
        covered[str(source_of(letter))] = Covered(
            positions=int(own.sum()),
            alone=int((own & (count == 1)).sum()),
            words=len(words[letter]),
            words_alone=len(words[letter] - others),
        )
    return Coverage(method, len(tokens), covered, nobody=int((count == 0).sum()))


PARTS = (16, 8, 4, 2)
"""Each smaller index holds one document in so many."""
MAX_TOKENS = 50_000_000
"""From a larger index, building the smaller ones takes minutes."""
MIN_DOCUMENTS = 10 * PARTS[0]
METHOD = "hd"


BuildIndex = Callable[[Path, Iterable[Document], TokenizerFingerprint, Sequence[Source]], object]
"""Builds a corpus index in a folder."""


def sizes(study: Study, build: BuildIndex, *, quiet: bool = False) -> Sizes | str:
    """The replays, or the reason why there are none."""
    corpus = study.store_set.corpus
    if corpus is None:
        return "there is no corpus index"
    counts = corpus.manifest.counts
    if counts["tokens"] > MAX_TOKENS:
        return f"the corpus index holds {counts['tokens']:,} tokens, and at most {MAX_TOKENS:,} are supported here"
    if counts["documents"] < MIN_DOCUMENTS:
        return f"the corpus index holds {counts['documents']} documents, and at least {MIN_DOCUMENTS} are needed"
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        bar(len(PARTS) + 1, "replays with less corpus", unit="sizes", quiet=quiet) as progress,
    ):
        for part in PARTS:
            rows.append(_size(study, _thinned(corpus, part, Path(scratch) / str(part), build)))
            progress.advance()
        rows.append(_size(study, corpus))
        progress.advance()
    return Sizes(METHOD, tuple(rows))


def _thinned(corpus: CorpusIndex, part: int, folder: Path, build: BuildIndex) -> CorpusIndex:
    """An index of one document in ``part``, drawn at random: many corpora alternate questions and answers."""
    manifest = corpus.manifest
    stored = stored_documents(corpus.documents, corpus.end)
    drawn = np.random.default_rng(0).random(manifest.counts["documents"]) < 1 / part
    documents = (Document(tokens) for tokens in compress(stored, drawn))
    build(folder, documents, manifest.tokenizer, [Source("a part of another index", "")])
    return CorpusIndex(folder)


def _size(study: Study, corpus: CorpusIndex) -> Size:
    store_set = StoreSet(study.store_set.model, corpus)
    contender = study.contender(METHOD, study.letters)
    # In one process, because the times are reported.
    result = replay([contender], study.conversations, store_set, workers=1)[contender.name]
    return Size(
        tokens=corpus.manifest.counts["tokens"],
        tokens_per_step=result.tokens_per_step,
        draft_us=result.draft_us(50),
        draft_us_p90=result.draft_us(90),
        corpus_us=result.source_seconds.get(SourceName.CORPUS, 0.0) / result.drafted_steps * 1e6,
    )


def data_of(
    study: Study, traces: Sequence[Trace], tokenizer: PreTrainedTokenizerBase, *, build: BuildIndex, quiet: bool = False
) -> ReportData:
    """Replay the answers of ``traces``, which ``study`` holds as token ids, for all figures of a report."""
    with bar(study.turns, "replays for the report", unit="turns", quiet=quiet) as progress:
        found = study.results(progress.to)
    questions = [trace.messages[answer.place - 1]["content"] for trace in traces for answer in trace.answers]
    return ReportData(
        shares=found.shares(),
        subsets=found.subsets(),
        orders=found.orders(),
        coverage=found.coverage(),
        repeats=repeats(study.conversations, study.store_set),
        sizes=sizes(study, build, quiet=quiet),
        case=case_of("hd", found.whole("hd"), tokenizer, questions),
    )


def traces_of(questions: Sequence[Prompt], answers: Sequence[AnsweredQuestion]) -> list[Trace]:
    """A benchmark's questions with one method's answers, as traces; questions without an answer are left out."""
    pairs = zip(questions, answers, strict=False)  # a benchmark may be incomplete
    traces = (_trace(question, answered) for question, answered in pairs)
    return [trace for trace in traces if trace.answers]


def _trace(question: Prompt, answered: AnsweredQuestion) -> Trace:
    turns = [turn for turn in answered.turns if turn.output_ids]  # none if the context was full before
    end = len(question.messages) + 2 * len(turns) - 1
    messages = question.conversation([turn.text for turn in turns])[:end]
    places = range(len(question.messages), end, 2)
    recorded = tuple(
        Recorded(place, tuple(turn.output_ids), None if turn.finish == STOPPED else len(turn.output_ids))
        for place, turn in zip(places, turns, strict=True)
    )
    return Trace(question.id, question.category, tuple(messages), recorded, f"question {question.id}")
