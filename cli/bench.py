"""``hdtool bench``: methods and transformers' own generate on one model, question by question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, MEASUREMENT, MODEL, OUTPUT, option
from hdtool.cli.parameters.unused_options import method_names
from hdtool.data.errors import OptionError
from hdtool.data.prompts import Prompt, of_all_categories, read_prompts
from hdtool.runtime.config import (
    METHODS,
    PEERS,
    BenchConfig,
    DecodeConfig,
    ModelConfig,
    SamplingConfig,
    StoresConfig,
)

if TYPE_CHECKING:
    from hdtool.data.bench_results import Results
    from hdtool.runtime.evaluation.bench_plan import Plan

Threads = Annotated[int | None, option(MODEL, "CPU threads of torch. Default: torch's own setting.")]


def bench(
    questions: Annotated[
        Path | None,
        option(INPUT, "Spec-Bench's question.jsonl, or prompts as generate takes them. Default: the embedded prompts."),
    ] = None,
    num_prompts: Annotated[
        int | None,
        option(
            INPUT, "Number of questions, round-robin over the categories. Default: all.", "--num-prompts", "--limit"
        ),
    ] = BenchConfig.limit,
    chat: options.Chat = None,
    model: options.Model = ModelConfig.model,
    assistant: Annotated[
        str | None, option(MODEL, "Draft model of generate-assisted: a folder or a hub name.")
    ] = BenchConfig.assistant,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    quantization: options.Quantization = ModelConfig.quantization,
    threads: Threads = BenchConfig.threads,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    methods: Annotated[
        list[str] | None,
        option(
            MEASUREMENT,
            f"Methods, with commas: {', '.join((*METHODS, *PEERS))}. Default: all that can run.",
            values=(*METHODS, *PEERS),
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        option(
            MEASUREMENT,
            "Method that speed-ups are relative to. Default: generate, else the first method.",
            values=(*METHODS, *PEERS),
        ),
    ] = None,
    rounds: Annotated[
        int, option(MEASUREMENT, "Runs of each question; the run of median speed counts.")
    ] = BenchConfig.rounds,
    warm_up: Annotated[
        int, option(MEASUREMENT, "Questions answered before the measurement, not counted.")
    ] = BenchConfig.warm_up,
    model_db: options.ModelDb = StoresConfig.model_db,
    corpus_db: options.CorpusDb = StoresConfig.corpus_db,
    draft_tokens: options.DraftTokens = DecodeConfig.draft_tokens,
    heads: options.Heads = None,
    tree: options.Tree = DecodeConfig.tree,
    max_new_tokens: options.MaxNewTokens = DecodeConfig.max_new_tokens,
    temperature: options.Temperature = SamplingConfig.temperature,
    top_k: options.TopK = SamplingConfig.top_k,
    top_p: options.TopP = SamplingConfig.top_p,
    repetition_penalty: options.RepetitionPenalty = SamplingConfig.repetition_penalty,
    seed: options.Seed = SamplingConfig.seed,
    generation_config: options.GenerationConfig = ModelConfig.generation_config,
    out: Annotated[Path, option(OUTPUT, "Folder of the results; the same command resumes an interrupted run.")] = Path(
        BenchConfig.out
    ),
    report: options.Report = None,
    temperatures: Annotated[str | None, option(OUTPUT, "More temperatures for --report, separated by commas.")] = None,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Compare the speed of all methods on your device.

    Every question is answered by each method in turn, and by transformers' own generate, on one model in one process.
    Prints tokens per second, speed-up, tokens per step and the number of identical answers for each task, and writes
    a file of answers per method in Spec-Bench's format.
    """
    chosen = method_names(methods)
    settings = BenchConfig(
        methods=chosen,
        baseline=baseline,
        assistant=assistant,
        limit=num_prompts,
        rounds=rounds,
        warm_up=warm_up,
        threads=threads,
        out=str(out),
    )
    decoding = DecodeConfig(
        draft_tokens=draft_tokens, max_new_tokens=max_new_tokens, heads=tuple(heads or ()), tree=tree
    )
    sampling = SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed
    )
    loading = ModelConfig(
        model=model,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        generation_config=generation_config,
    )
    more_temperatures = _temperatures(temperatures, sampling)
    asked = _questions(questions, num_prompts)

    from hdtool.cli.output.bench_table import record, table
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.write_report import report_bench
    from hdtool.data.bench_results import refuse_files_without_run
    from hdtool.runtime.evaluation.bench_plan import Plan
    from hdtool.runtime.evaluation.report.measured import Measured
    from hdtool.runtime.evaluation.report.write import prepare
    from hdtool.runtime.evaluation.scores import scores_of

    quiet_libraries()
    store_set = StoresConfig(model_db=model_db, corpus_db=corpus_db)
    plan = Plan(
        asked, bench=settings, model=loading, decoding=decoding, sampling=sampling, store_set=store_set, chat=chat
    )
    plans = (plan, *map(plan.at, more_temperatures))
    # Files in the way are refused before anything is measured.
    for one in plans:
        refuse_files_without_run(Path(one.bench.out), chosen or (*METHODS, *PEERS))
    if report:
        prepare(report)
    results, *others = (_measured(one, quiet) for one in plans)
    scores = scores_of(results, baseline)
    print(json.dumps(record(results, scores), ensure_ascii=False) if as_json else table(results, scores))
    if report:
        report_bench(report, plan, Measured(results, baseline, others), quiet=quiet)


def _measured(plan: Plan, quiet: bool) -> Results:
    from hdtool.data.progress import bar

    with bar(len(plan.questions), "questions", quiet=quiet) as shown:
        return plan.results(shown.to)


def _temperatures(listed: str | None, sampling: SamplingConfig) -> list[float]:
    """The temperatures besides that of the sampling settings."""
    if listed is None:
        return []
    try:
        found = [float(one) for one in listed.split(",")]
    except ValueError:
        raise OptionError(f"--temperatures must be numbers separated by commas, got {listed}") from None
    for temperature in found:
        replace(sampling, temperature=temperature)  # checks it
    return [temperature for temperature in dict.fromkeys(found) if temperature != sampling.temperature]


def _questions(path: Path | None, limit: int | None) -> Sequence[Prompt]:
    from hdtool.data import demo

    every = read_prompts(path or demo.PROMPTS)
    return every if limit is None else of_all_categories(every, limit)
