"""``hdtool bench-shape``: real step times of a model of some shape, with the acceptance of recorded answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdtool.cli.output import tables
from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, completion, option
from hdtool.cli.parameters.settings import only, without
from hdtool.data.errors import RecordError
from hdtool.data.inputs import find_inputs
from hdtool.data.tally import Tally
from hdtool.data.traces import read_traces
from hdtool.runtime.config import SHAPES, WARM, BuildConfig, DecodeConfig, ModelConfig, ShapeConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.evaluation.recorded_model import ReplayRunner, Timing
    from hdtool.runtime.model.load import Loaded
    from hdtool.runtime.stores.store_set import StoreSet

SHAPE = typer.Argument(
    help=f"{', '.join(SHAPES)}, or the path of a config.json.", autocompletion=completion(tuple(SHAPES))
)
LOADING = only("model", "device", "dtype", "threads", "trust_remote_code").described(model=options.THAT_ANSWERED)


def bench_shape(
    *,
    traces: Annotated[Path, option(INPUT, "Recorded answers, as replay takes them.")],
    config: Annotated[ShapeConfig, only("shape", "methods", "limit").described(shape=SHAPE)],
    loading: Annotated[ModelConfig, LOADING],
    decoding: Annotated[DecodeConfig, only("draft_tokens", "max_new_tokens")],
    stores: Annotated[StoresConfig, without("namespace")],
    reading: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Time a shape of model on recorded answers.

    Every step runs a real forward pass of a model with random weights; the accepted tokens are those of the recorded
    answers. So the speed of a large model can be measured without its weights.
    """
    tally = Tally()
    recorded = read_traces(find_inputs([traces]), tolerance=reading.max_bad_fraction, tally=tally)[: config.limit]

    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import print_left_out
    from hdtool.data.progress import bar
    from hdtool.runtime.evaluation.model_shapes import load_shape
    from hdtool.runtime.evaluation.recorded_model import fitting, paired_benchmark
    from hdtool.runtime.evaluation.recorded_turns import TurnReader
    from hdtool.runtime.model.checkpoint.identity import checkpoint_of
    from hdtool.runtime.model.cpu_threads import choose_threads
    from hdtool.runtime.stores.store_set import StoreSet

    quiet_libraries(quiet=quiet)
    loaded = load_shape(config.shape, loading)
    choose_threads(loaded.target, loading.threads)
    reader = TurnReader.of_model(loading)
    every = [turn for _, turns in reader.usable(recorded, tally) for turn in turns]
    print_left_out(tally, reading.max_bad_fraction)
    turns = fitting(every, loaded.target, decoding.max_new_tokens)
    if not turns:
        raise RecordError(f"no answer in {traces} ends within the context of {config.shape}: record shorter ones")
    if len(turns) < len(every):
        left_out = len(every) - len(turns)
        print(f"left out: {left_out} of {len(every)} answers, which do not fit the context", file=sys.stderr)
    store_set = StoreSet.for_tokenizer(loaded.tokenizer, stores, model=checkpoint_of(loading), identified=True)
    timings: dict[str, Timing] = {}
    new_runners = partial(_runners, config.methods, loaded, store_set, decoding)
    with bar(len(turns), "answers", quiet=quiet) as shown:
        for timings in paired_benchmark(new_runners, turns):  # noqa: B007 - the last ones are reported
            shown.advance()
    found = _report(loaded, str(traces), len(turns), timings)
    print(json.dumps(found, ensure_ascii=False) if as_json else table(found))


def _runners(
    methods: Sequence[str], loaded: Loaded, store_set: StoreSet, decoding: DecodeConfig
) -> dict[str, ReplayRunner]:
    from hdtool.runtime.drafters.methods import drafter_for
    from hdtool.runtime.evaluation.recorded_model import drafting_runner, generate_runner

    peers: dict[str, dict[str, Any]] = {"generate": {}, "generate-static": {"cache_implementation": "static"}}
    target = loaded.target
    return {
        name: generate_runner(target, **peers[name])
        if name in peers
        else drafting_runner(target, drafter_for(replace(decoding, method=name), target, store_set))
        for name in methods
    }


def _report(loaded: Loaded, traces: str, answers: int, found: dict[str, Timing]) -> dict[str, Any]:
    """As ``--json`` prints it; names stay as they are once they have shipped."""
    import torch

    from hdtool.runtime.environment import dtype_name, machine
    from hdtool.runtime.evaluation.model_shapes import weights_read
    from hdtool.runtime.evaluation.recorded_model import bandwidth

    target = loaded.target
    limit = weights_read(target) / bandwidth(target.device)
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
        "methods": {name: _figures(one, limit) for name, one in found.items()},
    }


def _figures(one: Timing, limit: float) -> dict[str, float]:
    figures = {"tokens": one.tokens, **tables.rounded(one, tokens_per_second=2)}
    if one.stats:
        figures |= tables.rounded(one.stats, tokens_per_step=3)
    if (later := one.later) and later.steps:
        figures |= {
            "model_ms_per_step": round(later.verify_ms_per_step, 4),
            "share_of_bandwidth_limit": round(1e3 * limit / later.verify_ms_per_step, 3),
            **tables.rounded(later, draft_us_per_step=1, outside_us_per_step=1),
        }
    return figures


COLUMNS = {
    "tokens_per_second": "tokens/s",
    "tokens_per_step": "per step",
    "model_ms_per_step": "model ms",
    "share_of_bandwidth_limit": "of limit",
    "draft_us_per_step": "draft µs",
    "outside_us_per_step": "around µs",
}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    steps = "captured steps" if found["captured"] else "steps called one by one"
    first = next(iter(found["methods"].values()))["tokens_per_second"]
    rows = [["", *COLUMNS.values(), "speed-up"]]
    for name, figures in found["methods"].items():
        cells = (f"{figures[column]:.2f}" if column in figures else "" for column in COLUMNS)
        rows.append([name, *cells, f"{figures['tokens_per_second'] / first:.2f}"])
    return "\n".join(
        (
            f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters in {found['dtype']}, {steps}",
            f"{found['machine']}, threads: {found['threads']}",
            f"{found['answers']} answers as recorded in {found['traces']}: real steps, recorded acceptance",
            "drafters: warm, with the history and the weights of the answers before",
            f"reading the weights once takes {found['bandwidth_limit_ms']:.2f} ms at the speed of a copy",
            "",
            tables.table(rows, widths=(16, *[9] * (len(COLUMNS) + 1))),
        )
    )
