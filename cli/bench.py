"""``hdtool bench``: methods and transformers' own generate on one model, question by question."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, OUTPUT, option
from hdtool.cli.parameters.settings import numbers, only, without
from hdtool.cli.parameters.structure import structured
from hdtool.data import demo
from hdtool.data.prompts import Prompt, of_all_categories, read_prompts
from hdtool.data.tasks import of_each_task
from hdtool.runtime.config import (
    METHODS,
    PEERS,
    BenchConfig,
    DecodeConfig,
    GrammarConfig,
    ModelConfig,
    SamplingConfig,
    StoresConfig,
)


def bench(
    *,
    questions: Annotated[
        Path | None,
        option(
            INPUT,
            "Spec-Bench's question.jsonl, or prompts as generate takes them. Default: the embedded prompts.",
            "--questions",
            "--prompts",
        ),
    ] = None,
    chat: options.Chat = None,
    settings: BenchConfig,
    decoding: Annotated[DecodeConfig, only("draft_tokens", "heads", "drafter", "tree", "max_new_tokens")],
    stores: Annotated[StoresConfig, without("namespace")],
    sampling: Annotated[SamplingConfig, without("stop")],
    structure: GrammarConfig,
    tools: options.Tools = None,
    loading: Annotated[ModelConfig, without("device_map", "threads").as_argument()],
    out: Annotated[Path, option(OUTPUT, "Folder of the results; the same command resumes an interrupted run.")] = Path(
        BenchConfig.out
    ),
    report: options.Report = None,
    temperatures: Annotated[str | None, option(OUTPUT, "More temperatures for --report, separated by commas.")] = None,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Compare the speed of all methods on your device.

    Every question is answered by each method in turn, and by the peers, on one model in one process: transformers' own
    generate, and llama.cpp for a model in a GGUF file. Prints tokens per second, speed-up, tokens per step and the
    number of identical answers for each task, and writes a file of answers per method in Spec-Bench's format.
    """
    more_temperatures = _temperatures(temperatures, sampling)
    asked, spare = _sample(structured(read_prompts(questions or demo.PROMPTS), structure, tools), settings)

    from hdtool.cli.output.bench_table import record, table
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.write_report import report_bench
    from hdtool.data.bench_results import refuse_files_without_run
    from hdtool.data.progress import late_bar
    from hdtool.runtime.evaluation.bench_plan import Plan
    from hdtool.runtime.evaluation.report.measured import Measured
    from hdtool.runtime.evaluation.report.write import prepare
    from hdtool.runtime.evaluation.scores import scores_of

    quiet_libraries(quiet=quiet)
    plan = Plan(asked, replace(settings, out=str(out)), loading, decoding, sampling, stores, chat, spare)
    plans = (plan, *map(plan.at, more_temperatures))
    # Files in the way are refused before anything is measured.
    for one in plans:
        refuse_files_without_run(Path(one.bench.out), settings.methods or (*METHODS, *PEERS))
    if report:
        prepare(report)
    measured = []
    for one in plans:
        with late_bar("answers", quiet=quiet) as show:
            measured.append(one.results(show))
    for one in plans:
        print(f"the results are in {one.bench.out}", file=sys.stderr)
    results, *others = measured
    scores = scores_of(results, settings.baseline)
    print(json.dumps(record(results, scores), ensure_ascii=False) if as_json else table(results, scores))
    if report:
        report_bench(report, plan, Measured(results, settings.baseline, others), quiet=quiet)


def _sample(prompts: list[Prompt], settings: BenchConfig) -> tuple[list[Prompt], list[Prompt]]:
    """The questions to measure, and those left for the warm-up."""
    measured = prompts
    if settings.per_task is not None:
        measured = of_each_task(prompts, settings.per_task)
    elif settings.limit is not None:
        measured = of_all_categories(prompts, settings.limit)
    chosen = set(map(id, measured))
    return measured, [prompt for prompt in prompts if id(prompt) not in chosen]


def _temperatures(listed: str | None, sampling: SamplingConfig) -> list[float]:
    """The temperatures besides that of the sampling settings."""
    found = numbers("temperatures", listed, float, "numbers separated by commas") or ()
    for temperature in found:
        replace(sampling, temperature=temperature)  # checks it
    return [temperature for temperature in dict.fromkeys(found) if temperature != sampling.temperature]
