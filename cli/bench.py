"""``hdtool bench``, ``bench-cost`` and ``bench-shape``: compare methods and time forward passes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, completion, quiet_libraries, with_structure
from hdtool.cli.options_from_settings import only, parse_numbers, without
from hdtool.cli.replay import Recordings
from hdtool.cli.result_tables import as_columns, fill_text, rounded, speedup_title
from hdtool.data import demo
from hdtool.data.errors import OptionError, RecordError
from hdtool.data.input_files import find_inputs
from hdtool.data.notes import note, tell
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt, interleave_categories, interleave_tasks, read_prompts
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.decoding import METHODS, DecodeConfig, GrammarConfig, StoresConfig
from hdtool.runtime.settings.measuring import (
    COST_FILE,
    PEERS,
    SHAPE_PEERS,
    SHAPES,
    WARM,
    BenchConfig,
    CostConfig,
    ShapeConfig,
)
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Panel, Use

if TYPE_CHECKING:
    from hdtool.builders.evaluation.experiment import Figures
    from hdtool.builders.evaluation.recorded_bench import Reproducing
    from hdtool.data.bench_results import Results
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.stores.store_set import StoreSet
    from hdtool.runtime.target.load import Loaded

GENERATE_OPTIONS: dict[str, dict[str, Any]] = {"generate-static": {"cache_implementation": "static"}}
"""Options of ``generate`` by method of ``bench-shape``; methods that call it without options are left out."""
SHAPE_ARGUMENT = typer.Argument(
    help=f"{', '.join(SHAPES)}, or the path of a config.json.", autocompletion=completion(tuple(SHAPES))
)
SHAPE_MODEL_OPTIONS = only("model", "device", "dtype", "threads", "trust_remote_code").described(
    model=options.ANSWERING_MODEL_HELP
)


def bench_shape(
    *,
    traces: Annotated[Path, Option(Panel.INPUT, "Recorded answers, as replay takes them.")],
    config: Annotated[ShapeConfig, only("shape", "methods", "limit").described(shape=SHAPE_ARGUMENT)],
    loading: Annotated[ModelConfig, SHAPE_MODEL_OPTIONS],
    decoding: Annotated[DecodeConfig, only("draft_tokens", "max_new_tokens")],
    stores: Annotated[StoresConfig, without("namespace")],
    reading: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Benchmark methods on a model shape with recorded answers.

    Every step runs a real forward pass of a model with random weights; the accepted tokens are those of the recorded
    answers. So the speed of a large model can be measured without its weights.
    """
    recorded = Recordings(find_inputs([traces]), reading.max_bad_fraction, limit=config.limit)

    from hdtool.builders.evaluation.random_models import load_shape
    from hdtool.builders.evaluation.recorded_bench import fitting_turns, recorded_benchmark
    from hdtool.builders.evaluation.recording import TurnReader, open_stores
    from hdtool.builders.evaluation.shared_threads import choose_shared_threads

    quiet_libraries(quiet=quiet)
    loaded = load_shape(config.shape, loading)
    peer = loaded.target.model if any(name in SHAPE_PEERS for name in config.methods) else None
    choose_shared_threads(loaded.target, peer, loading.threads)
    reader = TurnReader.of_model(loading)
    every = [turn for turns in recorded.turns(reader) for turn in turns]
    turns = fitting_turns(every, loaded.target, decoding.max_new_tokens)
    if not turns:
        raise RecordError(f"no answer in {traces} ends within the context of {config.shape}: record shorter ones")
    if len(turns) < len(every):
        left_out = len(every) - len(turns)
        tell(f"left out: {left_out} of {len(every)} answers, which do not fit the context")
    store_set = open_stores(loading, loaded.tokenizer, stores)
    contenders = {name: partial(_contender, name, loaded, store_set, decoding) for name in config.methods}
    totals: dict[str, Figures] = {}
    with progress_bar(len(turns), "answers") as progress:
        for totals in recorded_benchmark(contenders, turns):  # noqa: B007 - only the last totals are reported
            progress.advance()
    report = _shape_report(loaded, str(traces), len(turns), totals)
    print(json.dumps(report, ensure_ascii=False) if as_json else shape_table(report))


def _contender(name: str, loaded: Loaded, store_set: StoreSet, decoding: DecodeConfig) -> Reproducing:
    from hdtool.builders.evaluation.recorded_bench import drafting_contender, generate_contender
    from hdtool.runtime.drafters.drafter_factory import drafter_for

    if name in SHAPE_PEERS:
        return generate_contender(loaded.target, **GENERATE_OPTIONS.get(name, {}))
    drafter = drafter_for(replace(decoding, method=name), loaded.target, store_set)
    return drafting_contender(loaded.target, drafter)


def _shape_report(loaded: Loaded, traces: str, answers: int, totals: dict[str, Figures]) -> dict[str, Any]:
    """Return the ``--json`` record of ``bench-shape``."""
    import torch

    from hdtool.builders.evaluation.random_models import weight_bytes_read
    from hdtool.builders.evaluation.recorded_bench import copy_bandwidth
    from hdtool.builders.evaluation.timing import Timings, doubt
    from hdtool.runtime.kernels.machine_name import dtype_name, machine

    target = loaded.target
    limit = weight_bytes_read(target) / copy_bandwidth(target.device)
    return {
        "model": loaded.name,
        "parameters": sum(weight.numel() for weight in target.model.parameters()),
        "dtype": dtype_name(target.dtype),
        "machine": machine(target.device),
        "threads": torch.get_num_threads(),
        "captured": target.captures,
        "traces": traces,
        "answers": answers,
        "drafters": WARM,
        "bandwidth_limit_ms": round(1e3 * limit, 4),
        "doubt": doubt({name: Timings.of([total]) for name, total in totals.items()}) or None,
        "methods": {name: _figures(total, limit) for name, total in totals.items()},
    }


def _figures(total: Figures, limit: float) -> dict[str, float]:
    figures = {"tokens": total.tokens, **rounded(total, tokens_per_second=2, tokens_per_cpu_second=2)}
    if total.stats.steps:
        figures |= rounded(total.stats, tokens_per_step=3)
    if (later := total.later).steps:
        figures |= {
            "model_ms_per_step": round(later.verify_ms_per_step, 4),
            "share_of_bandwidth_limit": round(1e3 * limit / later.verify_ms_per_step, 3),
            **rounded(later, draft_us_per_step=1, outside_us_per_step=1),
        }
    return figures


SHAPE_COLUMNS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_cpu_second": "per CPU s",
    "tokens_per_step": "per step",
    "model_ms_per_step": "model ms",
    "share_of_bandwidth_limit": "of limit",
    "draft_us_per_step": "draft µs",
    "outside_us_per_step": "around µs",
}


def shape_table(report: dict[str, Any]) -> str:
    """Format the report of ``bench-shape`` as a text table."""
    steps = "captured steps" if report["captured"] else "steps called one by one"
    methods = report["methods"]
    compared = () if report["doubt"] else dict.fromkeys(name for name in ("ar", next(iter(methods))) if name in methods)
    rows = [["", *SHAPE_COLUMNS.values(), *map(speedup_title, compared)]]
    for name, figures in methods.items():
        cells = (f"{figures[column]:.2f}" if column in figures else "" for column in SHAPE_COLUMNS)
        ratios = (figures["tokens_per_second"] / methods[reference]["tokens_per_second"] for reference in compared)
        rows.append([name, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    return "\n".join(
        (
            *([fill_text(report["doubt"]), ""] if report["doubt"] else []),
            f"{report['model']}: {report['parameters'] / 1e9:.2f} billion parameters in {report['dtype']}, {steps}",
            f"{report['machine']}, threads of every method: {report['threads']}",
            f"{report['answers']} answers as recorded in {report['traces']}: real steps, recorded acceptance",
            "drafters: warm, with the history and the weights of the answers before",
            f"reading the weights once takes {report['bandwidth_limit_ms']:.2f} ms at the speed of a copy",
            "",
            as_columns(rows, widths=(16, *[8] * (len(rows[0]) - 1)), gap=1),
        )
    )


CONTEXTS_PER_BLOCK = 8
"""Maximum number of context lengths per table, so that a table fits a terminal."""


def bench_cost(
    *,
    loading: Annotated[ModelConfig, without("device_map", "generation_config").as_argument()],
    shape: Annotated[
        str | None,
        Option(
            Panel.MEASUREMENT,
            f"Time random weights of this shape. {', '.join(SHAPES)}, or a config.json.",
            values=SHAPES,
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        Option(
            Panel.MEASUREMENT,
            f"Context lengths separated by commas. Default: powers of two from {CostConfig.shortest} to "
            f"{CostConfig.longest} that fit the model.",
        ),
    ] = None,
    estimate: Annotated[CostConfig, only("bandwidth", "teraflops", "overlap")],
    out: Annotated[Path, Option(Panel.OUTPUT, "Folder of cost.json and cost.png.")] = Path(BenchConfig.out),
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Measure forward passes by draft tokens and context.

    Prints and writes the table. generate chooses the number of draft tokens by it from then on, and replay --cost
    predicts tokens per second from it.
    """
    lengths = parse_numbers("contexts", contexts, int, "lengths separated by commas, as in 128,1024")
    config = replace(estimate, contexts=lengths)
    if config.bandwidth and not shape:
        raise OptionError("--bandwidth estimates the passes of a shape: name one by --shape, as a config.json")

    from hdtool.builders.evaluation.cost_plot import cost_plot_file, draw_cost
    from hdtool.builders.evaluation.random_models import estimated_passes
    from hdtool.runtime.budget.cost_curve import cost_file

    quiet_libraries(quiet=quiet)
    figures, drawing = out / COST_FILE, out / "cost.png"
    for file in (cost_file(figures), cost_plot_file(drawing)):
        file.check()
    if shape and config.bandwidth:
        curve = estimated_passes(shape, loading, config)
    else:
        curve = _measured(shape, loading, config)
    curve.write(figures)
    draw_cost(curve, drawing)
    print(json.dumps(asdict(curve)) if as_json else cost_table(curve))


def _measured(shape: str | None, loading: ModelConfig, config: CostConfig) -> CostCurve:
    """Time forward passes, print a note if the times are in doubt, and save and return the cost curve."""
    from hdtool.builders.evaluation.measured_passes import measured_passes
    from hdtool.builders.evaluation.random_models import load_shape
    from hdtool.runtime.target.cpu_threads import choose_threads
    from hdtool.runtime.target.load import load

    loaded = load_shape(shape, loading) if shape else load(loading)
    choose_threads(loaded.target, loading.threads)
    curve, doubt = measured_passes(loaded, config)
    if doubt:
        note(doubt)
    return curve


def cost_table(curve: CostCurve) -> str:
    """Format milliseconds per forward pass as tables: a row per number of draft tokens, a column per context length."""
    blocks = [f"{curve.model} in {curve.dtype} on {curve.device}\nmilliseconds of a forward pass"]
    for first in range(0, len(curve.contexts), CONTEXTS_PER_BLOCK):
        shown = range(first, min(first + CONTEXTS_PER_BLOCK, len(curve.contexts)))
        rows = [["context", *(f"{curve.contexts[place]:,}" for place in shown)]]
        for column, nodes in enumerate(curve.nodes):
            name = f"{nodes} node" + "s" * (nodes != 1)
            rows.append([name, *(f"{curve.milliseconds[place][column]:.2f}" for place in shown)])
        blocks.append(as_columns(rows, widths=[8] * (len(shown) + 1), gap=1))
    return "\n\n".join(blocks)


def bench(
    *,
    questions: Annotated[
        Path | None,
        Option(
            Panel.INPUT,
            "Prompts, as generate takes them. Also Spec-Bench's question.jsonl. Default: the embedded prompts.",
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
    out: Annotated[
        Path, Option(Panel.OUTPUT, "Folder of the results. The same command resumes an interrupted run.")
    ] = Path(BenchConfig.out),
    report: options.Report = None,
    temperatures: Annotated[
        str | None,
        Option(
            Panel.OUTPUT,
            "More temperatures for --report, separated by commas.",
            use=Use(rare=True, no_effect=lambda given: given["report"] is None and "without --report"),
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Compare the speed of all methods on your device.

    Each method answers every question in turn, and so do the peers: transformers' own generate, and llama.cpp for a
    GGUF file. Prints tokens per second, speed-up, tokens per step and identical answers for each task, and writes a
    file of answers per method in Spec-Bench's format.
    """
    more_temperatures = _temperatures(temperatures, sampling)
    asked, spare = _sample(with_structure(read_prompts(questions or demo.PROMPTS), structure, tools), settings)

    from hdtool.builders.evaluation.bench_plan import BenchPlan
    from hdtool.builders.evaluation.report.measurements import BenchMeasurements
    from hdtool.builders.evaluation.report.pages import bench_page, check_report_folder
    from hdtool.builders.evaluation.scores import scores_of
    from hdtool.cli.result_tables import bench_record, bench_table, command_line, write_report
    from hdtool.data.bench_results import refuse_files_without_run
    from hdtool.runtime.target.load import load_tokenizer

    quiet_libraries(quiet=quiet)
    plan = BenchPlan(asked, replace(settings, out=str(out)), loading, decoding, sampling, stores, chat, spare)
    plans = (plan, *map(plan.at, more_temperatures))
    # Reject existing files before measuring anything.
    for one in plans:
        refuse_files_without_run(Path(one.bench.out), settings.methods or (*METHODS, *PEERS))
    if report:
        check_report_folder(report)
    measured: list[Results] = []
    for one in plans:
        threads = measured[0].run.surroundings["threads"] if measured else None
        measured.append(one.results(threads))
    for one in plans:
        tell(f"the results are in {one.bench.out}")
    results, *others = measured
    scores = scores_of(results, settings.baseline)
    print(json.dumps(bench_record(results, scores), ensure_ascii=False) if as_json else bench_table(results, scores))
    if report:
        measurements = BenchMeasurements(results, settings.baseline, others)
        write_report(report, bench_page(measurements, asked, load_tokenizer(loading), command_line()))


def _sample(prompts: list[Prompt], settings: BenchConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return ``(measured, spare)``: the questions to measure, and all others, which are used for the warm-up."""
    measured = prompts
    if settings.per_task is not None:
        measured = interleave_tasks(prompts, settings.per_task)
    elif settings.limit is not None:
        measured = interleave_categories(prompts, settings.limit)
    chosen = set(map(id, measured))
    return measured, [prompt for prompt in prompts if id(prompt) not in chosen]


def _temperatures(listed: str | None, sampling: SamplingConfig) -> list[float]:
    """Parse ``--temperatures``, dropping duplicates and the temperature that ``sampling`` already has."""
    temperatures = parse_numbers("temperatures", listed, float, "numbers separated by commas") or ()
    for temperature in temperatures:
        replace(sampling, temperature=temperature)  # raises if it is invalid
    return [temperature for temperature in dict.fromkeys(temperatures) if temperature != sampling.temperature]
