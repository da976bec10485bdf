"""How replays and benchmarks become a page: ``--report``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.builders.report.measured import Measured
    from hdtool.builders.report.page import Page
    from hdtool.builders.report.study import Study
    from hdtool.data.traces import Trace
    from hdtool.runtime.cost import CostCurve
    from hdtool.runtime.plan import Plan
    from hdtool.runtime.played import Played


def report_replay(
    folder: Path,
    study: Study,
    traces: Sequence[Trace],
    tokenizer: PreTrainedTokenizerBase,
    played: Mapping[str, Played],
    curve: CostCurve | None,
    *,
    quiet: bool,
) -> None:
    from hdtool.builders.report.pages import page_of_replay
    from hdtool.builders.report.recordings import shown_by

    shown = shown_by(study, traces, tokenizer, quiet=quiet)
    _write(folder, page_of_replay(_command(), study, shown, played, curve))


def report_bench(folder: Path, plan: Plan, measured: Measured, *, quiet: bool) -> None:
    """The answers that were measured are replayed for what no benchmark can show."""
    from hdtool.builders.report.pages import page_of_bench
    from hdtool.builders.report.recordings import shown_by, traces_of
    from hdtool.builders.report.study import Study
    from hdtool.runtime.load import load_stops, load_tokenizer
    from hdtool.runtime.shelf import Shelf
    from hdtool.runtime.turns import TurnReader

    answers = measured.results.answers
    replayed = measured.scores.reference or next(iter(answers))
    tokenizer = load_tokenizer(plan.model)
    reader = TurnReader(tokenizer, load_stops(plan.model, tokenizer), tokenizer.eos_token_id, plan.chat)
    traces = traces_of(plan.questions, answers[replayed])
    shelf = Shelf.for_tokenizer(tokenizer, plan.shelf)
    study = Study([reader.turns(trace) for trace in traces], shelf, plan.decoding.budget)
    shown = shown_by(study, traces, tokenizer, quiet=quiet)
    _write(folder, page_of_bench(_command(), measured, study, shown, replayed))


def _command() -> str:
    """As it was typed."""
    return shlex.join(["hdtool", *sys.argv[1:]])


def _write(folder: Path, page: Page) -> None:
    from hdtool.builders.report.write import write

    print(f"report: {write(folder, page)}", file=sys.stderr)
