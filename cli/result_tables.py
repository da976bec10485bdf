"""Format the results of ``bench`` and ``replay`` as tables and JSON, and write their reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hdtool.builders.evaluation.report.tables import Table
from hdtool.builders.evaluation.scores import ALL_TASKS, PLAIN_METHOD, Score, Scores, method_in_words
from hdtool.data.bench_results import Results
from hdtool.data.notes import tell
from hdtool.data.progress import count_of
from hdtool.runtime.settings.measuring import COLD, WARM
from hdtool.runtime.settings.model import INT8

if TYPE_CHECKING:
    from hdtool.builders.evaluation.replay import ReplayedTurn, ReplayResult
    from hdtool.builders.evaluation.report.pages import Page
    from hdtool.runtime.budget.cost_curve import CostCurve

TABLE_WIDTH = 80


def rounded(source: object, **digits: int) -> dict[str, float]:
    """Return the attributes of ``source`` named in ``digits``, each rounded to the number of decimals given there."""
    return {name: round(getattr(source, name), places) for name, places in digits.items()}


def fill_text(text: str) -> str:
    """Break a text between words only, so that paths and commands stay whole."""
    return fill(text, TABLE_WIDTH, break_long_words=False, break_on_hyphens=False)


def as_columns(rows: Sequence[Sequence[str]], *, left: int = 1, widths: Sequence[int] = (), gap: int = 2) -> str:
    """Align rows in columns, of which the first ``left`` are left-aligned and all others right-aligned.

    ``widths`` are the columns' minimum widths, and ``gap`` is the number of spaces between columns.
    """
    columns = zip_longest(*rows, fillvalue="")
    min_widths = [*widths, *[0] * max(map(len, rows))]
    fitted = [max(size, *map(len, column)) for size, column in zip(min_widths, columns, strict=False)]
    return "\n".join(
        (" " * gap)
        .join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, fitted, strict=False))
        )
        .rstrip()
        for row in rows
    )


BLOCK_WIDTHS = (17, 8, 12, 8, 11, 9)
"""Minimum column widths, so that the blocks of all tasks align."""
MIN_TASK_WIDTH, MAX_TASK_WIDTH = 6, 9
"""Minimum width of a task's column, and maximum length of its title."""
MAX_METHOD_NAME = 13
"""Maximum length of a method's name in a column title."""
DRAFTER_STATES = {
    COLD: "memory: cold, a fresh drafter for each question",
    WARM: "memory: warm, with the history and the weights of the questions before",
    None: "memory: warm, with the weights of the questions before, without a history",
}
"""Note on the drafters' memory, by the run's ``drafters`` option; None is the key for runs that predate the option."""


def bench_record(results: Results, scores: Scores) -> dict[str, Any]:
    """Return the ``--json`` record of a benchmark."""
    from hdtool.builders.evaluation.llama_cpp_peer import BUILD_KEY

    run = results.run
    about = ("model", "device", "dtype", "threads", "machine")
    return {
        **{name: run.surroundings[name] for name in about},
        "temperature": run.options["temperature"],
        "drafters": run.options.get("drafters"),
        "llama_cpp": run.surroundings.get(BUILD_KEY),
        "questions": run.questions,
        "started": run.started,
        **scores.to_json(),
    }


def bench_table(results: Results, scores: Scores) -> str:
    """Format a benchmark: headline, setting, a block per task, costs per step, tables that compare tasks, and notes."""
    from hdtool.builders.evaluation.llama_cpp_peer import build_notes

    run = results.run
    about = run.surroundings
    # Results of earlier versions lack the key.
    rounded = about.get("activations") == INT8
    heads = [
        f"{about['model']} on {about['device']} in {about['dtype']}{', activations in int8' * rounded}, "
        f"{run.questions} questions, "
        f"temperature {run.options['temperature']:g}",
        f"{about['machine']}, threads of every method: {about['threads']}",
        DRAFTER_STATES[run.options.get("drafters")],
    ]
    notes = ["tokens/s, tokens/CPU s: tokens per second of wall time and of CPU time, mean over questions"]
    notes += [
        f"{speedup_title(reference)}: speed over that of {method_in_words(reference)}"
        for reference in scores.comparisons
        if speedup_title(reference) != f"vs {reference}"
    ]
    notes.append("a step: one forward pass")
    if scores.reference:
        notes.append(f"identical: questions with the same tokens as {scores.reference} in all turns")
    if rounded and any(method.startswith("generate") for method in scores.tasks[ALL_TASKS]):
        notes.append("generate does not round activations: its answers may differ")
    if "llama_cpp" in about:
        notes.append(f"llama.cpp ({about['llama_cpp']}) rounds activations: its answers may differ")
    notes += build_notes(about)
    blocks = [_block(task, scores) for task in scores.tasks]
    blocks.append(_costs(scores.tasks[ALL_TASKS]))
    if len(scores.tasks) > 1:
        blocks += _by_task("tokens/s", scores, lambda task, name: f"{scores.tasks[task][name].tokens_per_second:.1f}")
        for reference in scores.comparisons:
            blocks += _by_task(speedup_title(reference), scores, partial(_speedup, scores, reference))
        blocks += _by_task(
            "tokens a step", scores, lambda task, name: f"{scores.tasks[task][name].tokens_per_step:.2f}"
        )
    setting, explained = ("\n".join(map(fill_text, lines)) for lines in (heads, notes))
    return "\n\n".join([fill_text(scores.headline()), setting, *blocks, explained])


def speedup_title(reference: str) -> str:
    """Return the title of a column that shows speed-ups over the method ``reference``."""
    return (
        "vs plain"
        if reference == PLAIN_METHOD
        else f"vs {reference}"
        if len(reference) <= MAX_METHOD_NAME
        else "vs baseline"
    )


def _speedup(scores: Scores, reference: str, task: str, method: str) -> str:
    return f"{scores.speedup(task, method, reference):.2f}"


def _by_task(title: str, scores: Scores, cell: Callable[[str, str], str]) -> Iterator[str]:
    """Yield tables with a column per task, at most ``TABLE_WIDTH`` wide; the last column combines all tasks."""
    methods = [title, *scores.tasks[ALL_TASKS]]
    widest = max(map(len, methods))
    columns_shown: list[list[str]] = []
    left = TABLE_WIDTH - widest
    for task in scores.tasks:
        column = [shortened(task, MAX_TASK_WIDTH), *(cell(task, method) for method in methods[1:])]
        width = 1 + max(MIN_TASK_WIDTH, *map(len, column))
        if width > left and columns_shown:
            yield _side_by_side(methods, columns_shown)
            columns_shown, left = [], TABLE_WIDTH - widest
        columns_shown.append(column)
        left -= width
    yield _side_by_side(methods, columns_shown)


def _side_by_side(methods: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    rows = list(zip(methods, *columns, strict=True))
    return as_columns(rows, widths=(0, *[MIN_TASK_WIDTH] * len(columns)), gap=1)


def shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _block(task: str, scores: Scores) -> str:
    task_scores = scores.tasks[task]
    questions = next(iter(task_scores.values())).questions
    times = {speedup_title(reference): ".2f" for reference in scores.comparisons}
    rows = (
        [
            method,
            score.tokens_per_second,
            score.tokens_per_cpu_second,
            *(scores.speedup(task, method, reference) for reference in scores.comparisons),
            score.identical,
        ]
        for method, score in task_scores.items()
    )
    speeds = {"tokens/s": ".1f", "tokens/CPU s": ".1f"}
    columns = {f"{task} ({questions})": "", **speeds, **times, "identical": ""}
    return as_columns(Table.of("", columns, rows).lines, widths=BLOCK_WIDTHS)


def _costs(scores: Mapping[str, Score]) -> str:
    """Format each method's tokens, draft tokens, drafting time and model time per step."""
    rows = (
        [method, score.tokens_per_step, score.nodes_per_step, score.draft_us_per_step, score.model_ms_per_step]
        for method, score in scores.items()
    )
    columns = {"a step": "", "tokens": ".2f", "draft tokens": ".1f", "drafting, µs": ".0f", "pass, ms": ".2f"}
    return as_columns(Table.of("", columns, rows).lines, widths=BLOCK_WIDTHS[:2])


Replays = Mapping[str, "ReplayResult"]


def replay_record(results: Replays, curve: CostCurve | None, warm: Sequence[str] = ()) -> dict[str, Any]:
    """Return the ``--json`` record of a replay.

    ``warm`` lists the files given to ``--warm``.
    """
    record: dict[str, Any] = {"methods": {name: _method_record(result, curve) for name, result in results.items()}}
    record["warm"] = list(warm)
    if curve:
        of_any = next(iter(results.values())).predict(curve)
        record["plain"] = {"tokens_per_second": round(of_any.plain_tokens_per_second, 2)}
        record["cost"] = {"device": curve.device, "model": curve.model, "dtype": curve.dtype}
    return record


def _method_record(result: ReplayResult, curve: CostCurve | None) -> dict[str, Any]:
    predicted = result.predict(curve) if curve else None
    forecast = {**rounded(predicted, tokens_per_second=2, speedup=3), "pays": predicted.pays} if predicted else {}
    return {
        **_rates(result),
        **rounded(result, accepted_share=4),
        "draft_us_p50": round(result.draft_us(50), 1),
        "draft_us_p99": round(result.draft_us(99), 1),
        "observe_us_p50": round(result.observe_us(50), 1),
        "observe_us_p99": round(result.observe_us(99), 1),
        **forecast,
        **_memory(result),
        "by_category": {name: _rates(part) for name, part in result.by_category().items()},
        "by_source": {
            str(source): {
                "drafted": share.drafted,
                "accepted": share.accepted,
                "hits": share.hits,
                "unique": share.unique,
                "microseconds": round(share.seconds * 1e6, 1),
            }
            for source, share in result.by_source().items()
        },
    }


def _rates(result: ReplayResult) -> dict[str, Any]:
    return {
        **rounded(result, tokens_per_step=3, nodes_per_step=2),
        "tokens": result.tokens,
        "steps": result.steps,
        "turns": len(result.turns),
    }


def _memory(result: ReplayResult) -> dict[str, Any]:
    return {"history": "growing" if result.history else "none", "warm_tokens": result.warm_tokens}


def turn_record(result: ReplayResult, turn: ReplayedTurn) -> dict[str, Any]:
    """Return one record of the ``--steps`` file: the steps of one method in one turn."""
    from hdtool.runtime.settings.draft_sources import SourceId

    return {
        "method": result.method,
        "conversation": turn.conversation,
        "category": turn.category,
        "turn": turn.number,
        "prompt_tokens": turn.prompt_tokens,
        "tokens": len(turn.tokens),
        "steps": len(turn.accept_lengths),
        "accept_lengths": turn.accept_lengths.tolist(),
        "nodes": turn.nodes.tolist(),
        "sources": [str(SourceId(source)) for source in turn.sources.tolist()],
        **_memory(result),
    }


def replay_table(results: Replays, curve: CostCurve | None, warm: Sequence[str] = ()) -> str:
    from hdtool.builders.evaluation.report.pages import memory_notes, speed_forecast

    first = next(iter(results.values()))
    conversations = len({turn.conversation for turn in first.turns})
    blocks = [
        f"{count_of(conversations, 'conversation')}, {count_of(len(first.turns), 'answer')}, "
        f"{count_of(first.tokens, 'token')}\n" + fill_text("history: " + "; ".join(memory_notes(results, warm))),
        as_columns(_overview(results).lines),
    ]
    if len(first.by_category()) > 1:
        blocks.append("Tokens per step by category\n\n" + as_columns(_categories(results).lines))
    if (sources := _sources(results)).rows:
        blocks.append("By source\n\n" + as_columns(sources.lines, left=2))
    if curve:
        predicted = speed_forecast(results, curve)
        blocks += [fill_text(predicted.title), as_columns(predicted.lines), *filter(None, [predicted.note])]
    return "\n\n".join(blocks)


def _overview(results: Replays) -> Table:
    columns = {"tokens/step": ".3f", "nodes/step": ".1f", "accepted": ".1%", "drafting µs p50": ".0f", "p99": ".0f"}
    rows = (
        (
            name,
            result.tokens_per_step,
            result.nodes_per_step,
            result.accepted_share if result.nodes else None,
            result.draft_us(50),
            result.draft_us(99),
        )
        for name, result in results.items()
    )
    return Table.of("", {"method": "", **columns}, rows)


def _categories(results: Replays) -> Table:
    parts = [result.by_category() for result in results.values()]
    rows = (
        (name or "(none)", len(first.turns), *(part[name].tokens_per_step for part in parts))
        for name, first in parts[0].items()
    )
    return Table.of("", {"category": "", "answers": ",", **dict.fromkeys(results, ".3f")}, rows)


def _sources(results: Replays) -> Table:
    columns = {"drafted": ",", "accepted": ",", "share": ".1%", "in steps": ".0%", "µs a step": ".0f"}
    rows = (
        (
            name,
            str(source),
            share.drafted,
            share.accepted,
            share.accepted / share.drafted if share.drafted else None,
            share.hits / max(1, result.drafted_steps),
            share.seconds / max(1, result.drafted_steps) * 1e6,
        )
        for name, result in results.items()
        for source, share in result.by_source().items()
    )
    return Table.of("", {"method": "", "source": "", **columns}, rows)


def write_report(folder: Path, page: Page) -> None:
    from hdtool.builders.evaluation.report.pages import write_page

    tell(f"report: {write_page(folder, page)}")


def command_line() -> str:
    """Return the command line of this process, for a report."""
    return shlex.join(["hdtool", *sys.argv[1:]])
