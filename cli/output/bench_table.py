"""Scores of a benchmark as tables of 80 columns and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hdtool.cli.output import tables
from hdtool.data.bench_results import Results
from hdtool.runtime.config import COLD, WARM
from hdtool.runtime.config.model import INT8
from hdtool.runtime.evaluation.llama_cpp_peer import KEY, notes_of
from hdtool.runtime.evaluation.report.tables import Table
from hdtool.runtime.evaluation.scores import OVERALL, PLAIN, Score, Scores, in_words

COLUMNS = (17, 8, 8, 11, 8, 9)
"""Least widths, so that the blocks align."""
LEAST_WIDTH, TASK_WIDTH = 6, 9
"""Least and greatest widths of a column of a task."""
LONGEST = 13
"""Characters of a method in the title of a column."""
DRAFTERS = {
    COLD: "memory: cold, a fresh drafter for each question",
    WARM: "memory: warm, with the history and the weights of the questions before",
    None: "memory: warm, with the weights of the questions before, without a history",
}
"""What the drafters knew; runs of earlier versions do not say it."""


def record(results: Results, scores: Scores) -> dict[str, Any]:
    """What ``--json`` prints; names stay as they are once they have shipped."""
    run = results.run
    about = ("model", "device", "dtype", "threads", "machine")
    return {
        **{name: run.surroundings[name] for name in about},
        "temperature": run.options["temperature"],
        "drafters": run.options.get("drafters"),
        "llama_cpp": run.surroundings.get(KEY),
        "questions": run.questions,
        "started": run.started,
        **scores.to_json(),
    }


def table(results: Results, scores: Scores) -> str:
    """The setting, a block for each task and for all of them, and tables with a column for each task."""
    run = results.run
    about = run.surroundings
    # Results of earlier versions do not have it.
    rounded = about.get("activations") == INT8
    heads = [
        f"{about['model']} on {about['device']} in {about['dtype']}{', activations in int8' * rounded}, "
        f"{run.questions} questions, "
        f"temperature {run.options['temperature']:g}",
        f"{about['machine']}, threads: {about['threads']}",
        DRAFTERS[run.options.get("drafters")],
    ]
    notes = ["tokens/s: mean over questions", "per step: tokens per forward pass"]
    notes[1:1] = [
        f"{_versus(other)}: speed over that of {in_words(other)}"
        for other in scores.comparisons
        if _versus(other) != f"vs {other}"
    ]
    if scores.reference:
        notes.append(f"identical: questions with the same tokens as {scores.reference} in all turns")
    if rounded and any(method.startswith("generate") for method in scores.tasks[OVERALL]):
        notes.append("generate does not round activations: its answers may differ")
    if "llama_cpp" in about:
        notes.append(f"llama.cpp ({about['llama_cpp']}) rounds activations: its answers may differ")
    notes += notes_of(about)
    blocks = [_block(task, scores) for task in scores.tasks]
    blocks.append(_costs(scores.tasks[OVERALL]))
    if len(scores.tasks) > 1:
        blocks += _by_task("tokens/s", scores, lambda task, name: f"{scores.tasks[task][name].tokens_per_second:.1f}")
        for other in scores.comparisons:
            blocks += _by_task(_versus(other), scores, partial(_speedup, scores, other))
        blocks += _by_task("per step", scores, lambda task, name: f"{scores.tasks[task][name].tokens_per_step:.2f}")
    setting, explained = ("\n".join(map(tables.filled, lines)) for lines in (heads, notes))
    return "\n\n".join([tables.filled(scores.headline()), setting, *blocks, explained])


def _versus(other: str) -> str:
    """The title of a column with speeds over those of another method."""
    return "vs plain" if other == PLAIN else f"vs {other}" if len(other) <= LONGEST else "vs baseline"


def _speedup(scores: Scores, other: str, task: str, method: str) -> str:
    return f"{scores.speedup(task, method, other):.2f}"


def _by_task(title: str, scores: Scores, cell: Callable[[str, str], str]) -> Iterator[str]:
    """A column for each task, as many side by side as fit; all questions come last."""
    methods = [title, *scores.tasks[OVERALL]]
    widest = max(map(len, methods))
    shown: list[list[str]] = []
    left = tables.WIDTH - widest
    for task in scores.tasks:
        column = [_shortened(task), *(cell(task, method) for method in methods[1:])]
        width = 1 + max(LEAST_WIDTH, *map(len, column))
        if width > left and shown:
            yield _side_by_side(methods, shown)
            shown, left = [], tables.WIDTH - widest
        shown.append(column)
        left -= width
    yield _side_by_side(methods, shown)


def _side_by_side(methods: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    rows = list(zip(methods, *columns, strict=True))
    return tables.table(rows, widths=(0, *[LEAST_WIDTH] * len(columns)), gap=1)


def _shortened(task: str) -> str:
    return task if len(task) <= TASK_WIDTH else task[: TASK_WIDTH - 1] + "…"


def _block(task: str, scores: Scores) -> str:
    found = scores.tasks[task]
    questions = next(iter(found.values())).questions
    times = {_versus(other): ".2f" for other in scores.comparisons}
    rows = (
        [
            method,
            score.tokens_per_second,
            *(scores.speedup(task, method, other) for other in scores.comparisons),
            score.tokens_per_step,
            score.identical,
        ]
        for method, score in found.items()
    )
    columns = {f"{task} ({questions})": "", "tokens/s": ".1f", **times, "per step": ".2f", "identical": ""}
    return tables.table(Table.of("", columns, rows).lines, widths=COLUMNS)


def _costs(found: Mapping[str, Score]) -> str:
    """What a step takes."""
    rows = ([method, one.nodes_per_step, one.draft_us_per_step, one.model_ms_per_step] for method, one in found.items())
    columns = {"a step": "", "draft tokens": ".1f", "drafting, µs": ".0f", "pass, ms": ".2f"}
    return tables.table(Table.of("", columns, rows).lines, widths=COLUMNS[:1])
