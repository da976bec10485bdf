"""``hdtool bench``: all methods and the library's own, on one model, question by question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options
from hdtool.cli.bench_cost import bench_cost
from hdtool.cli.bench_shape import bench_shape
from hdtool.data.errors import OptionError
from hdtool.data.prompts import Prompt, of_all_categories, read_prompts
from hdtool.runtime.config import (
    METHODS,
    PEERS,
    SHAPES,
    BenchConfig,
    DecodeConfig,
    ModelConfig,
    SamplingConfig,
    ShapeConfig,
    StoresConfig,
)

if TYPE_CHECKING:
    from hdtool.data.bench_results import Results
    from hdtool.runtime.evaluation.bench_plan import Plan


def bench(
    questions: Annotated[
        Path | None,
        typer.Option(
            help="Spec-Bench's question.jsonl, or prompts as generate takes them. Default: the embedded ones."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Separated by commas: {', '.join(METHODS)}; the library's {', '.join(PEERS)}. Default: all that can."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="What the others are compared with. Default: generate, else the first method.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the results; run the same command again to go on after a kill.")
    ] = Path(BenchConfig.out),
    limit: Annotated[
        int | None, typer.Option(help="Questions at most, of all categories in turn.")
    ] = BenchConfig.limit,
    rounds: Annotated[
        int, typer.Option(help="How often each question is asked; the round of median speed counts.")
    ] = BenchConfig.rounds,
    warm_up: Annotated[
        int, typer.Option(help="Questions of different categories asked before, and not counted.")
    ] = BenchConfig.warm_up,
    model: options.Model = ModelConfig.model,
    assistant: Annotated[
        str | None, typer.Option(help="The draft model of generate-assisted: a folder or a hub name.")
    ] = BenchConfig.assistant,
    model_db: options.ModelDb = StoresConfig.model_db,
    corpus_db: options.CorpusDb = StoresConfig.corpus_db,
    budget: options.Budget = DecodeConfig.budget,
    heads: options.Heads = None,
    tree: options.Tree = DecodeConfig.tree,
    max_new_tokens: options.MaxNewTokens = DecodeConfig.max_new_tokens,
    temperature: options.Temperature = SamplingConfig.temperature,
    top_k: options.TopK = SamplingConfig.top_k,
    top_p: options.TopP = SamplingConfig.top_p,
    repetition_penalty: options.RepetitionPenalty = SamplingConfig.repetition_penalty,
    seed: options.Seed = SamplingConfig.seed,
    generation_config: options.GenerationConfig = ModelConfig.generation_config,
    report: options.Report = None,
    temperatures: Annotated[
        str | None,
        typer.Option(help="Of --report: temperatures separated by commas that everything is measured at as well."),
    ] = None,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    quantise: options.Quantise = ModelConfig.quantise,
    threads: Annotated[
        int | None, typer.Option(help="That torch computes with on a CPU. Default: as torch has it.")
    ] = BenchConfig.threads,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    chat: options.Chat = None,
    quiet: options.Quiet = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Measure instead what a forward pass takes, by draft nodes and context.")
    ] = False,
    contexts: Annotated[
        str | None,
        typer.Option(help="Of --cost: lengths separated by commas. Default: powers of two from 64 to 8192 at most."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Time instead a model of this size with random weights, which says what --traces has on record: "
            f"{', '.join(SHAPES)}, or a config.json. --model names whose tokenizer the record is in."
        ),
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Of --shape: recorded answers, as replay takes them.")] = None,
    as_json: options.JsonObject = False,
) -> None:
    """Measure on your own device what each method brings.

    Every question is answered by all methods in turn, and by transformers' own generate, on one model in one
    process. Writes a file of answers for each method, as Spec-Bench's scripts read them, and tells tokens per
    second, speed-up, tokens per step and how many questions got the very same tokens, for each task.
    """
    chosen = tuple(name.strip() for listed in methods for name in listed.split(",")) if methods else None
    settings = BenchConfig(None if shape else chosen, baseline, assistant, limit, rounds, warm_up, threads, str(out))
    decoding = DecodeConfig(budget=budget, max_new_tokens=max_new_tokens, heads=tuple(heads or ()), tree=tree)
    sampling = SamplingConfig(temperature, top_k, top_p, repetition_penalty, seed)
    loading = ModelConfig(
        model, device, dtype, trust_remote_code, quantise=quantise, generation_config=generation_config
    )
    if cost or contexts is not None:
        _refuse_beside_cost(
            cost,
            questions=questions,
            methods=methods,
            baseline=baseline,
            limit=limit,
            report=report,
            temperatures=temperatures,
            traces=traces,
        )
        return bench_cost(loading, shape, contexts, threads, out, quiet, as_json)
    if shape is not None:
        _refuse_beside_shape(
            questions=questions, baseline=baseline, assistant=assistant, report=report, temperatures=temperatures
        )
        timed = ShapeConfig(shape, chosen or ShapeConfig.methods, limit)
        stores = StoresConfig(model_db, corpus_db)
        return bench_shape(timed, traces, replace(loading, threads=threads), decoding, stores, quiet, as_json)
    if traces is not None:
        raise OptionError("--traces belongs to --shape: give both")
    hotter = _temperatures(temperatures, report, sampling)
    asked = _questions(questions, limit)

    from hdtool.cli.output.bench_table import record, table
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.write_report import report_bench
    from hdtool.data.bench_results import refuse_files_without_run
    from hdtool.runtime.evaluation.bench_plan import Plan
    from hdtool.runtime.evaluation.report.measured import Measured
    from hdtool.runtime.evaluation.report.write import prepare
    from hdtool.runtime.evaluation.scores import scores_of

    quiet_libraries()
    plan = Plan(asked, settings, loading, decoding, sampling, StoresConfig(model_db, corpus_db), chat)
    plans = (plan, *map(plan.at, hotter))
    # What is in the way is refused before anything is measured.
    for one in plans:
        refuse_files_without_run(Path(one.bench.out), chosen or (*METHODS, *PEERS))
    if report:
        prepare(report)
    results, *others = (_measured(one, quiet) for one in plans)
    scores = scores_of(results, baseline)
    if as_json:
        print(json.dumps(record(results, scores), ensure_ascii=False))
    else:
        print(table(results, scores))
    if report:
        report_bench(report, plan, Measured(results, baseline, others), quiet=quiet)


def _measured(plan: Plan, quiet: bool) -> Results:
    from hdtool.data.progress import bar

    with bar(len(plan.questions), "questions", quiet=quiet) as shown:
        return plan.results(shown.to)


def _temperatures(listed: str | None, report: Path | None, sampling: SamplingConfig) -> list[float]:
    """Those besides the one that is measured anyway."""
    if listed is None:
        return []
    if report is None:
        raise OptionError("--temperatures belongs to --report: give both")
    try:
        found = [float(one) for one in listed.split(",")]
    except ValueError:
        raise OptionError(f"--temperatures is {listed}, it must be numbers separated by commas") from None
    for temperature in found:
        replace(sampling, temperature=temperature)  # refuses what is none
    return [temperature for temperature in dict.fromkeys(found) if temperature != sampling.temperature]


def _refuse_beside_cost(cost: bool, **given: object) -> None:
    if not cost:
        raise OptionError("--contexts belongs to --cost: give both")
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"--cost asks no questions: leave out --{name}")


def _refuse_beside_shape(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"--shape asks no questions: leave out --{name}")


def _questions(path: Path | None, limit: int | None) -> Sequence[Prompt]:
    from hdtool.data import demo

    every = read_prompts(path or demo.PROMPTS)
    return every if limit is None else of_all_categories(every, limit)
