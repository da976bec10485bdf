"""Scores of a benchmark as tables of 80 columns and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from hdtool.cli.output import tables
from hdtool.data.bench_results import Results
from hdtool.runtime.config import COLD, WARM
from hdtool.runtime.config.model import INT8
from hdtool.runtime.evaluation.llama_cpp_peer import KEY, notes_of
from hdtool.runtime.evaluation.report.tables import Table
from hdtool.runtime.evaluation.scores import OVERALL, Score, Scores

WIDTH = 80
COLUMNS = (17, 7, 8, 8, 9, 8, 8)
"""Least widths, so that the blocks align."""
BY_TASK = {
    "tokens/s": ("tokens_per_second", ".1f"),
    "speed-up": ("speedup", ".2f"),
    "per step": ("tokens_per_step", ".2f"),
}
LEAST_WIDTH, TASK_WIDTH = 6, 9
"""Least and greatest widths of a column of a task."""
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
    notes = [f"tokens/s: mean over questions; speed-up: against {scores.baseline}", "per step: tokens per forward pass"]
    if scores.reference:
        notes.append(f"identical: questions with the same tokens as {scores.reference} in all turns")
    if rounded and any(method.startswith("generate") for method in scores.tasks[OVERALL]):
        notes.append("generate does not round activations: its answers may differ")
    if "llama_cpp" in about:
        notes.append(f"llama.cpp ({about['llama_cpp']}) rounds activations: its answers may differ")
    notes += (fill(note, WIDTH, break_on_hyphens=False) for note in notes_of(about))
    blocks = [_block(task, found) for task, found in scores.tasks.items()]
    if len(scores.tasks) > 1:
        for title, (name, form) in BY_TASK.items():
            blocks += _by_task(title, scores, name, form)
    return "\n\n".join(["\n".join(fill(head, WIDTH) for head in heads), *blocks, "\n".join(notes)])


def _by_task(title: str, scores: Scores, name: str, form: str) -> Iterator[str]:
    """A column for each task, as many side by side as fit; all questions come last."""
    methods = [title, *scores.tasks[OVERALL]]
    widest = max(map(len, methods))
    shown: list[list[str]] = []
    left = WIDTH - widest
    for task, found in scores.tasks.items():
        column = [_shortened(task), *(f"{getattr(score, name):{form}}" for score in found.values())]
        width = 1 + max(LEAST_WIDTH, *map(len, column))
        if width > left and shown:
            yield _side_by_side(methods, shown)
            shown, left = [], WIDTH - widest
        shown.append(column)
        left -= width
    yield _side_by_side(methods, shown)


def _side_by_side(methods: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    rows = list(zip(methods, *columns, strict=True))
    return tables.table(rows, widths=(0, *[LEAST_WIDTH] * len(columns)), gap=1)


def _shortened(task: str) -> str:
    return task if len(task) <= TASK_WIDTH else task[: TASK_WIDTH - 1] + "…"


def _block(task: str, found: Mapping[str, Score]) -> str:
    questions = next(iter(found.values())).questions
    whole = task == OVERALL
    columns = {"tokens/s": ".1f", "speed-up": ".2f", "per step": ".2f", "identical": ""}
    rows = []
    for method, score in found.items():
        row = [method, score.tokens_per_second, score.speedup, score.tokens_per_step, score.identical]
        rows.append(row + whole * [score.draft_us_per_step, score.model_ms_per_step])
    columns |= {"draft, µs": ".0f", "pass, ms": ".2f"} if whole else {}
    shown = Table.of("", {f"{task} ({questions})": "", **columns}, rows)
    return tables.table(shown.lines, widths=COLUMNS[: len(shown.columns)])
