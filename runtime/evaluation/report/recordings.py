"""The part of a report that is computed from recorded answers, without the model."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hdtool.data.conversations.conversation import STOPPED
from hdtool.data.progress import bar
from hdtool.data.prompts import Prompt
from hdtool.data.spec_bench import AnsweredQuestion
from hdtool.data.traces import Recorded, Trace
from hdtool.runtime.evaluation.report.ablations import Study
from hdtool.runtime.evaluation.report.cases import case_of
from hdtool.runtime.evaluation.report.corpus_sizes import BuildIndex, sizes
from hdtool.runtime.evaluation.report.figures import ReportData
from hdtool.runtime.evaluation.report.repeats import repeats


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
