"""``train-heads``: reads texts, trains heads, evaluates them and saves them into a folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from hdtool.builders.heads.batch_sampler import BatchSampler
from hdtool.builders.heads.distributed import process_group, world_size
from hdtool.builders.heads.draft_vocabulary import draft_vocabulary
from hdtool.builders.heads.evaluate import evaluate, summary
from hdtool.builders.heads.examples import Example, read_examples
from hdtool.builders.heads.frozen_target import FrozenTarget
from hdtool.builders.heads.hidden_states import HiddenStates, hidden_states_file
from hdtool.builders.heads.training import Training, checkpoint_file
from hdtool.builders.heads.training_curve import curve_file, draw_training
from hdtool.data.errors import OptionError
from hdtool.data.inputs import find_inputs
from hdtool.data.progress import bar
from hdtool.data.records import Reading
from hdtool.runtime.config import HeadsConfig, ModelConfig, TrainConfig
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads, new_heads, output_files
from hdtool.runtime.environment import fingerprint, machine
from hdtool.runtime.evaluation.recorded_turns import TurnReader
from hdtool.runtime.model.families import context_limit
from hdtool.runtime.model.load import load_stock
from hdtool.runtime.model.target import Target


def train(
    inputs: Sequence[str],
    out: Path,
    model: ModelConfig,
    heads: HeadsConfig,
    config: TrainConfig,
    *,
    chat: bool | None = None,
    hidden_states: Path | None = None,
    quiet: bool = False,
) -> Iterator[str]:
    """Train heads; yields lines for the user."""
    stored_in = [hidden_states_file(hidden_states)] if hidden_states else []
    for file in (*output_files(out), checkpoint_file(out), curve_file(out), *stored_in):
        file.check()
    if hidden_states and world_size() > 1:
        raise OptionError("--hidden-states works in one process: leave it out, or start one process")
    processes = process_group(on_cpu=model.device == "cpu" or not torch.cuda.is_available())
    if world_size() > 1 and model.device == "auto" and torch.cuda.is_available():
        model = replace(model, device=f"cuda:{torch.cuda.current_device()}")
    quiet = quiet or processes.rank > 0
    target = Target(load_stock(model))
    texts, left_out = _texts(inputs, model, target, config, chat, quiet)
    yield from left_out if processes.rank == 0 else ()
    frozen = FrozenTarget(target)
    torch.manual_seed(config.seed)
    batches = BatchSampler(texts, config)
    heads, token_ids = draft_vocabulary(heads, batches.train, frozen.vocabulary)
    made = new_heads(target.model, frozen.hidden_width, frozen.vocabulary, heads, token_ids)
    settings = {
        **asdict(config),
        **asdict(heads),
        "target": fingerprint(target.model),
        "texts": _digest(texts),
        "processes": processes.size,
    }
    stored = None
    if hidden_states:
        stored = HiddenStates(hidden_states, frozen, texts, f"{settings['target']} {settings['texts']}")
        if not stored.is_written():
            yield f"{hidden_states}: hidden states of {stored.tokens:,} tokens, {stored.bytes / 1e9:.2f} GB"
            _write(stored, quiet=quiet)
    training = Training(made, frozen, batches, config, out, processes, stored)
    if processes.rank == 0:
        yield (
            f"{sum(weight.numel() for weight in made.parameters()):,} weights are trained on {len(batches.train):,} "
            f"texts ({batches.tokens:,} tokens) in {training.steps:,} steps"
        )
    seconds = time.monotonic()
    with bar(training.steps, "training", unit="steps", quiet=quiet) as shown:
        for done in training.run(settings):
            shown.show(training.summary())
            shown.to(done)
    if processes.rank:
        return
    result = evaluate(made.eval(), frozen, batches.validation)
    report = {
        **asdict(config),
        "texts": len(batches.train),
        "tokens": batches.tokens,
        "steps": training.steps,
        "seconds": round(time.monotonic() - seconds),
        "processor_seconds": round(time.process_time()),
        "machine": machine(target.device),
        "loss": round(training.history.losses[-1], 4),
    }
    SavedHeads(made, settings["target"], model.name, result, report).save(out)
    draw_training(training.history, out)
    training.finish()
    yield from summary(result)
    yield f"{out}: heads for {model.name}, evaluated on {len(batches.validation):,} texts held out"


def _write(stored: HiddenStates, *, quiet: bool) -> None:
    with bar(stored.tokens, "hidden states", unit="tokens", quiet=quiet) as shown:
        for done in stored.write():
            shown.to(done)


def _digest(texts: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in texts:
        digest.update(example.ids.tobytes() + example.drafted.tobytes())
    return digest.hexdigest()[:16]


def _texts(
    inputs: Sequence[str], model: ModelConfig, target: Target, config: TrainConfig, chat: bool | None, quiet: bool
) -> tuple[list[Example], list[str]]:
    """The examples, and a line for each record that was left out."""
    reading = Reading(find_inputs(inputs), tolerance=config.max_bad_fraction)
    turns = TurnReader.of_model(model, chat)
    window = min(config.window, context_limit(target.config, config.window) or config.window)
    with bar(reading.total_bytes, "reading", unit="B", quiet=quiet) as shown:
        found = read_examples(reading, turns, window, shown)
    return found, reading.tally.left_out()
