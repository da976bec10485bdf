"""Replays for a report: what each source drafted, and a typical answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.experiment import shown_pieces
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult
from hdtool.builders.evaluation.report.figures import ReportData
from hdtool.builders.evaluation.report.tables import (
    SourceCounts,
    SourceShares,
    TypicalCase,
    source_wins,
)
from hdtool.builders.evaluation.parallel_replay import replay
from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.data.conversation import STOPPED
from hdtool.data.prompts import Prompt
from hdtool.data.texts_and_traces import RecordedAnswer, Trace
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.draft_sources import SOURCE_LETTERS
from hdtool.runtime.config.draft_token_limits import FIXED_BUDGET
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
        pieces=tuple(
            (text, str(source))
            for text, source in shown_pieces(tokenizer, typical.tokens.tolist(), typical.sources.tolist())
        ),
        tokens=len(typical.tokens),
        steps=len(typical.accept_lengths),
    )


@dataclass(frozen=True)
class Study:
    """Recorded answers, stores to draft from, and settings of a report's replays."""

    conversations: Sequence[Sequence[RecordedTurn]]
    store_set: StoreSet
    budget: int | None = None
    workers: int | None = None
    curve: CostCurve | None = None
    """Cost curve that decides how many draft tokens pay if ``budget`` is None."""
    method: str = "hd"

    @property
    def draft_tokens(self) -> str:
        """Phrase that states how many tokens are drafted per step."""
        if self.budget is None and self.curve:
            return "as many draft tokens a step as pay"
        return f"at most {FIXED_BUDGET if self.budget is None else self.budget} draft tokens a step"

    def contender(self, sources: str) -> ReplayMethod:
        """Return the method, set up to draft from ``sources`` in the given order; its name is ``sources``."""
        order = sources + "".join(letter for letter in SOURCE_LETTERS if letter not in sources)
        config = DecodeConfig(self.method, draft_tokens=self.budget, sources=sources, order=order, lookahead=False)
        return ReplayMethod(sources, config, self.curve)

    def results(self, choices: Sequence[str]) -> Mapping[str, ReplayResult]:
        """Replay every choice of sources, and return the results by choice."""
        contenders, title = list(map(self.contender, choices)), "replay for the report"
        return replay(contenders, self.conversations, self.store_set, workers=self.workers, title=title)


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


def report_data(study: Study, traces: Sequence[Trace], tokenizer: PreTrainedTokenizerBase) -> ReportData:
    """Replay ``study``, and return its source shares and a typical answer; ``traces`` are its conversations as text."""
    letters = study.store_set.letters
    whole = study.results([letters])[letters]
    questions = [trace.messages[answer.message_index - 1]["content"] for trace in traces for answer in trace.answers]
    return ReportData(
        shares=(source_shares(study.method, whole),),
        case=typical_case(study.method, whole, tokenizer, questions),
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
