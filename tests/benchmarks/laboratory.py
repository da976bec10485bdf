"""Code that the benchmarks share: options, clocks, runs in turn, models that answer prompts, and Markdown tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from transformers.utils import logging

from hdtool.builders.evaluation.contenders import Contender, DraftingContender, FreshDrafters
from hdtool.builders.evaluation.experiment import Answering, Experiment, Figures, Question, by_contender, identical
from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader, open_stores
from hdtool.data import demo
from hdtool.data.chat import encode_conversation, encode_text
from hdtool.data.prompts import read_prompts
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.measuring import COLD
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

Side = TypeVar("Side")
Conversations = Sequence[Sequence[RecordedTurn]]
"""Turns of each recorded conversation."""
DOCS = Path(__file__).parents[2] / "docs"
NO_STORES = StoresConfig("none", "none")


def parser_of(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with an option for each default, which also tells the option's type."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            several = isinstance(default, list | tuple)
            one = default[0] if several else default
            kind = str if one is None else type(one)
            parser.add_argument(option, type=kind, nargs="*" if several else None, default=default)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return parser


class Table:
    """Markdown table that is printed row by row."""

    def __init__(self, *heads: object) -> None:
        self.row(*heads)
        print("|---" * len(heads) + "|", flush=True)

    def row(self, *cells: object) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock of a measurement: CPU time with one thread, as others disturb it little, else wall time."""
    return time.process_time if threads == 1 else time.perf_counter


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def run_in_turn(
    sides: Mapping[str, Side],
    runs: Mapping[str, Callable[[Side], object]],
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Return the median seconds of each run by side; sides take turns, after a repeat that isn't counted."""
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for run in runs.values():
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats + 1):
            for name, side in sides.items():
                taken[name].append(seconds_of(lambda run=run, side=side: run(side), clock))  # type: ignore[misc]
        for name, seconds in taken.items():
            medians[name].append(median(seconds[1:]))
    return medians


def documentation(loaded: Loaded, length: int, number: int = 1) -> list[str]:
    """Return ``number`` passages of the documentation, each of ``length`` tokens."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    ids = encode_text(loaded.tokenizer, text, special=False)
    ids *= 1 + number * length // len(ids)
    return [str(loaded.tokenizer.decode(ids[place * length : (place + 1) * length])) for place in range(number)]


def parser_of_recordings(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    parser = parser_of(description, model_db="none", corpus_db="none", raw=False, **defaults)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--model", required=True)
    return parser


def read_recordings(options: argparse.Namespace) -> tuple[Conversations, StoreSet]:
    """Return the recorded conversations and the stores to draft from."""
    loading = ModelConfig(model=options.model)
    reader = TurnReader.of_model(loading, False if options.raw else None)
    conversations = [reader.turns(trace) for trace in read_traces([options.traces]) if trace.answers]
    stores = StoresConfig(options.model_db, options.corpus_db)
    return conversations, open_stores(loading, reader.tokenizer, stores)


class Outcome:
    """Rows and totals of an experiment, which ``__init__`` runs."""

    def __init__(
        self,
        contenders: Mapping[str, Callable[[], Answering[Question]]],
        questions: Sequence[Question],
        rounds: int = 1,
        memory: str = COLD,
        *,
        warm_up: Sequence[Question] = (),
    ) -> None:
        experiment = Experiment(contenders, rounds, memory)
        experiment.warm_up(warm_up)
        by_question = list(experiment.rows(questions))
        self.rows = by_contender(row for rows in by_question for row in rows)
        self.totals = {name: Figures.of(turn for row in rows for turn in row.turns) for name, rows in self.rows.items()}
        self.identical = sum(map(identical, by_question))
        """Number of questions to which all answers have the same tokens."""


def demo_prompts(loaded: Loaded, count: int | None = None) -> list[list[int]]:
    """Return the token ids of the embedded model's held-out prompts."""
    return [encode_conversation(loaded.tokenizer, prompt.messages) for prompt in read_prompts(demo.PROMPTS)[:count]]


def method_contender(
    loaded: Loaded, decoding: DecodeConfig, stores: StoresConfig = NO_STORES, sampling: SamplingConfig | None = None
) -> DraftingContender:
    """Return one of hdtool's methods as a contender whose drafters start empty."""
    new = FreshDrafters(loaded.target, loaded.store_opener(stores).open(decoding.databases))
    return drafting(loaded, lambda: new(decoding), decoding.max_new_tokens, sampling)


def drafting(
    loaded: Loaded, new: Callable[[], Drafter], max_new_tokens: int, sampling: SamplingConfig | None = None
) -> DraftingContender:
    return DraftingContender(loaded, new(), sampling or SamplingConfig(), max_new_tokens, new)


def on_prompts(contender: Contender) -> Callable[[], Answering[list[int]]]:
    """Return a function that makes the contender for an experiment whose questions are prompts as token ids."""

    def new() -> Answering[list[int]]:
        fresh = contender.fresh()
        return lambda prompt: [fresh.answer(prompt)]

    return new


def on_numbered_prompts(
    contender: DraftingContender, prompts: Sequence[list[int]], sampling_of: Callable[[int], SamplingConfig]
) -> Callable[[], Answering[int]]:
    """Return a function that makes the contender for an experiment whose questions are indices in ``prompts``."""

    def new() -> Answering[int]:
        fresh = contender.fresh()
        return lambda number: [replace(fresh, sampling=sampling_of(number)).answer(prompts[number])]

    return new


def ratio_of(speeds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of speeds, answer by answer."""
    return median(speed / other for speed, other in zip(speeds, others, strict=True))
