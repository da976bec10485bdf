"""``--report``: writes the page of a replay or a benchmark."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.stores.documents import Document, Source
    from hdtool.data.stores.store import TokenizerFingerprint
    from hdtool.data.traces import Trace
    from hdtool.runtime.evaluation.bench_plan import Plan
    from hdtool.runtime.evaluation.report.ablations import Study
    from hdtool.runtime.evaluation.report.figures import ReportData
    from hdtool.runtime.evaluation.report.measured import Measured
    from hdtool.runtime.evaluation.report.page import Page


def write_report(
    folder: Path,
    study: Study,
    traces: Sequence[Trace],
    tokenizer: PreTrainedTokenizerBase,
    page_of: Callable[[str, ReportData], Page],
    *,
    quiet: bool,
) -> None:
    """Write the page of a study; ``page_of`` makes it from the command line of this process and the data."""
    from hdtool.runtime.evaluation.report.recordings import data_of
    from hdtool.runtime.evaluation.report.write import write

    data = data_of(study, traces, tokenizer, build=_build_in_process, quiet=quiet)
    page = page_of(shlex.join(["hdtool", *sys.argv[1:]]), data)
    print(f"report: {write(folder, page)}", file=sys.stderr)


def report_bench(folder: Path, plan: Plan, measured: Measured, *, quiet: bool) -> None:
    """The page of a benchmark, with replays of the measured answers for the figures that need them."""
    from hdtool.runtime.evaluation.recorded_turns import TurnReader
    from hdtool.runtime.evaluation.report.ablations import Study
    from hdtool.runtime.evaluation.report.pages import page_of_bench
    from hdtool.runtime.evaluation.report.recordings import traces_of
    from hdtool.runtime.model.checkpoint.identity import checkpoint_of
    from hdtool.runtime.stores.store_set import StoreSet

    answers = measured.results.answers
    replayed = measured.scores.reference or next(iter(answers))
    reader = TurnReader.of_model(plan.model, plan.chat)
    traces = traces_of(plan.questions, answers[replayed])
    store_set = StoreSet.for_tokenizer(reader.tokenizer, plan.store_set, model=checkpoint_of(plan.model))
    study = Study([reader.turns(trace) for trace in traces], store_set, plan.decoding.draft_tokens)
    page_of = partial(page_of_bench, measured, study, replayed)
    write_report(folder, study, traces, reader.tokenizer, page_of, quiet=quiet)


def _build_in_process(
    folder: Path, documents: Iterable[Document], tokenizer: TokenizerFingerprint, sources: Sequence[Source]
) -> None:
    """Build a corpus index in this process."""
    from hdtool.builders.stores.build_corpus_index import build_corpus_index
    from hdtool.builders.stores.engine import LocalEngine

    build_corpus_index(folder, documents, tokenizer, sources, engine=LocalEngine(1))
