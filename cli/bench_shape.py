"""``hdtool bench --shape``: real step costs of a model of some shape, acceptance as recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data.errors import OptionError, RecordError
from hdtool.data.traces import read_traces
from hdtool.runtime.config import DecodeConfig, ModelConfig, ShapeConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.evaluation.recorded_model import Teller, Timed
    from hdtool.runtime.model.load import Loaded
    from hdtool.runtime.stores.store_set import StoreSet


def bench_shape(
    shape: ShapeConfig,
    traces: Path | None,
    model: ModelConfig,
    decoding: DecodeConfig,
    store_set: StoresConfig,
    quiet: bool,
    as_json: bool,
) -> None:
    """Time a random model of a shape while it says what is on record, and print what that took."""
    if traces is None:
        raise OptionError("--shape needs answers on record: name a file of them with --traces, as replay takes them")
    recorded = read_traces([traces])[: shape.limit]

    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.evaluation.model_shapes import load_shape
    from hdtool.runtime.evaluation.recorded_model import Race, fitting
    from hdtool.runtime.evaluation.recorded_turns import TurnReader
    from hdtool.runtime.model.cpu_threads import settle_threads
    from hdtool.runtime.model.load import load_stops
    from hdtool.runtime.stores.store_set import StoreSet

    quiet_libraries()
    loaded = load_shape(shape.shape, model)
    settle_threads(loaded.target, model.threads)
    tokenizer = loaded.tokenizer
    reader = TurnReader(tokenizer, load_stops(model, tokenizer), tokenizer.eos_token_id)
    every = [turn for trace in recorded for turn in reader.turns(trace)]
    turns = fitting(every, loaded.target, decoding.max_new_tokens)
    if not turns:
        raise RecordError(f"no answer in {traces} ends within the context of {shape.shape}: record shorter ones")
    if len(turns) < len(every):
        left_out = len(every) - len(turns)
        print(f"left out: {left_out} of {len(every)} answers, which do not fit the context", file=sys.stderr)
    race = Race(_tellers(shape.methods, loaded, StoreSet.for_tokenizer(tokenizer, store_set), decoding))
    with bar(len(turns), "answers", quiet=quiet) as shown:
        for done in race.run(turns):
            shown.to(done)
    found = _report(loaded, str(traces), len(turns), race.found)
    print(json.dumps(found, ensure_ascii=False) if as_json else table(found))


def _tellers(methods: Sequence[str], loaded: Loaded, store_set: StoreSet, decoding: DecodeConfig) -> dict[str, Teller]:
    from hdtool.runtime.drafters.methods import drafter_for
    from hdtool.runtime.evaluation.recorded_model import ours, theirs

    peers: dict[str, dict[str, Any]] = {"generate": {}, "generate-static": {"cache_implementation": "static"}}
    target = loaded.target
    return {
        name: theirs(target, **peers[name])
        if name in peers
        else ours(target, drafter_for(replace(decoding, method=name), target, store_set))
        for name in methods
    }


def _report(loaded: Loaded, traces: str, answers: int, found: dict[str, Timed]) -> dict[str, Any]:
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
        "bandwidth_limit_ms": round(1e3 * limit, 4),
        "methods": {name: _figures(one, limit) for name, one in found.items()},
    }


def _figures(one: Timed, limit: float) -> dict[str, float]:
    figures = {"tokens": one.tokens, "tokens_per_second": round(one.tokens_per_second, 2)}
    if one.stats:
        figures["tokens_per_step"] = round(one.stats.tokens_per_step, 3)
    if (later := one.later) and later.steps:
        figures |= {
            "model_ms_per_step": round(later.verify_ms_per_step, 4),
            "share_of_bandwidth_limit": round(1e3 * limit / later.verify_ms_per_step, 3),
            "draft_us_per_step": round(later.draft_us_per_step, 1),
            "outside_us_per_step": round(later.outside_us_per_step, 1),
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
    """The figures in lines."""
    steps = "captured steps" if found["captured"] else "steps called one by one"
    lines = [
        f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters in {found['dtype']}, {steps}",
        f"{found['machine']}, threads: {found['threads']}",
        f"{found['answers']} answers as recorded in {found['traces']}: the steps are real, what is accepted is theirs",
        f"reading the weights once takes {found['bandwidth_limit_ms']:.2f} ms at the speed of a copy",
        "",
        f"{'':<16}" + "".join(f"{name:>11}" for name in COLUMNS.values()) + f"{'speed-up':>11}",
    ]
    first = next(iter(found["methods"].values()))["tokens_per_second"]
    for name, figures in found["methods"].items():
        cells = [f"{figures[column]:>11.2f}" if column in figures else f"{'':>11}" for column in COLUMNS]
        lines.append(f"{name:<16}" + "".join(cells) + f"{figures['tokens_per_second'] / first:>11.2f}")
    return "\n".join(lines)
