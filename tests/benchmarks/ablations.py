"""Ablations: tokens per step of `hd` with all of its mechanisms, and without each of them in turn.

    python -m tests.benchmarks.ablations --recorded chat traces.jsonl MODEL --recorded edits edits.jsonl MODEL
    python -m tests.benchmarks.ablations --answered SmolLM2.gguf --questions question.jsonl

Every conversation starts with a new drafter. Recordings are replayed with ``hd``, edits as plain text. Mechanisms that
read the model's logits or draws are measured on sampled answers by ``hd+logitspec``. Mechanisms must be replaced before
their code is compiled, so each variant runs in a separate process with a separate cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import torch

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.builders.evaluation.replay import ReplayMethod
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.answerer import decode
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import Budget, CostBudget, FixedBudget
from hdtool.runtime.config import DecodeConfig, ModelConfig, ReplayConfig, SamplingConfig, StoresConfig
from hdtool.runtime.config.model import ACTIVATIONS
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sequence import Step
from hdtool.runtime.drafters.methods import drafter_with_budget
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of
from tests.benchmarks.known_draws import MAX_PROMPT_TOKENS, SEEDS, in_turn
from tests.benchmarks.methods import cold, warm

NODES = 32, 64
COST = CostCurve.given("0:20,8:21,32:24,64:32")
"""Milliseconds per pass, which a budget uses to choose the number of nodes."""
NO_LIMIT = 1e18
HIERARCHY = "hdtool.runtime.drafters.hierarchy"
Figures = dict[str, float]


@numba.njit
def _nothing(*given: Any) -> None:
    pass


@numba.njit
def _orders_up_to_8(length: int) -> int:
    return min(length, 8)


@numba.njit
def _one_amount(total: Any, spread: int) -> int:
    """Return a bucket that ignores the amount of evidence."""
    return 9 + spread


@numba.njit
def _one_spread(total: Any, distinct: Any) -> int:
    return 2


TEXT: Mapping[str, Mapping[str, Any]] = {
    "recency": {"tree.weigh_recency": _nothing},
    "short matches": {"matches.LONGEST_SHORT": 0},
    "orders of matches above 8": {"matches.level_of": _orders_up_to_8},
    "learned weights": {"tree.learn": _nothing},
    "weights that forget": {"weights.EMA_WINDOW": NO_LIMIT},
    "amount of the evidence": {"matches.bucket_of": _one_amount, "evidence.bucket_of": _one_amount},
    "spread of the evidence of stores": {"evidence.spread_of": _one_spread},
    "history": {},
}
LOGITS: Mapping[str, Mapping[str, Any]] = {
    "recency": {"tree.weigh_recency": _nothing},
    "agreement": {"tree.agree": _nothing},
    "known draws": {"tree.weigh_draws": _nothing},
    "recycled rankings": {},
    "last logit": {},
}
"""Maps each mechanism to replacements of functions or constants. Sources with a letter are removed from the method
instead."""
LETTERS = {"history": "H", "recycled rankings": "R", "last logit": "L"}
EVERYTHING = "everything"


def replace(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        module, attribute = name.split(".")
        found = import_module(f"{HIERARCHY}.{module}")
        assert hasattr(found, attribute), name
        setattr(found, attribute, value)


def recorded(title: str, traces: str, model: str, *, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield tokens per step of a recording, or tokens per second of pass time if a budget chooses the nodes."""
    loading = ModelConfig(model=model)
    reader = TurnReader.of_model(loading, False if "edits" in title else None)
    conversations = [reader.turns(trace) for trace in read_traces([Path(traces)]) if trace.answers][: options.limit]
    named = StoresConfig(options.model_db, options.corpus_db)
    stores = StoreSet.for_tokenizer(reader.tokenizer, named, model=checkpoint_of(loading))
    sources = "".join(letter for letter in "CHMS" if letter != LETTERS.get(options.without))
    for nodes in (*NODES, None):
        contender = ReplayMethod("hd", ReplayConfig(("hd",), nodes, sources=sources).decoding("hd"), COST)
        played = cold(contender, conversations, stores)
        if nodes:
            yield f"{title}, {nodes}", played.tokens_per_step
        else:
            passes = sum(float(COST.seconds_of_passes(turn.nodes, turn.contexts).sum()) for turn in played.turns)
            yield f"{title}, chosen", played.tokens / passes
    contender = ReplayMethod("hd", ReplayConfig(("hd",), NODES[0], sources=sources).decoding("hd"))
    yield f"{title}, warm", warm(contender, conversations, stores).tokens_per_step


def answered(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield tokens per step of a model's sampled answers."""
    loaded = load(ModelConfig(options.answered, device="cpu", activations=options.activations))
    prompts = in_turn(list(read_prompts(options.questions)))[: options.limit]
    sources = "".join(letter for letter in "CHMSLR" if letter != LETTERS.get(options.without))
    for nodes in (*NODES, None):
        config = DecodeConfig("hd+logitspec", options.max_new_tokens, draft_tokens=nodes, sources=sources)
        stores = StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig("none", "none"), config.databases)
        tokens, passes = 0, 0.0
        for number, prompt in enumerate(prompts):
            asked = encode_conversation(loaded.tokenizer, prompt.messages[:1])
            if len(asked) <= MAX_PROMPT_TOKENS:
                sampling = SamplingConfig(temperature=options.temperature, seed=SEEDS + number)
                budget = FixedBudget(nodes) if nodes else CostBudget(COST)
                drafter = drafter_with_budget(partial(_same, budget), config, stores, loaded.target)
                steps = steps_of(loaded, drafter, asked, sampling, options.max_new_tokens)[1:]
                tokens += sum(len(step.tokens) for step in steps)
                passes += len(steps) if nodes else sum(COST.seconds(len(step.tree)) for step in steps)
        yield f"sampled, {nodes or 'chosen'}", tokens / passes


def _same(budget: Budget) -> Budget:
    return budget


def steps_of(
    loaded: Loaded, drafter: Drafter, asked: list[int], sampling: SamplingConfig, max_new_tokens: int
) -> list[Step]:
    sampler, stops = sampler_for(loaded, sampling, asked, max_new_tokens=max_new_tokens)
    return list(decode(loaded.target, asked, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter))


def measured(without: str) -> Figures:
    """Return the figures of a process without the given mechanism."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.ablations", *sys.argv[1:], "--without", without]
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def print_row(name: str, figures: Figures, all_of_them: Figures) -> None:
    if figures is all_of_them:
        cells = [f"{figure:.3f}" for figure in figures.values()]
    else:
        cells = [f"{100 * (figure / all_of_them[title] - 1):+.2f} %" for title, figure in figures.items()]
    print("| " + " | ".join([name, *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", nargs=3, action="append", default=[], metavar=("TITLE", "TRACES", "MODEL"))
    parser.add_argument("--model-db", default="none")
    parser.add_argument("--corpus-db", default="none")
    parser.add_argument("--answered", metavar="MODEL")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, help="conversations of each recording, or questions")
    parser.add_argument("--mechanisms", nargs="+")
    parser.add_argument("--without", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mechanisms = LOGITS if options.answered else TEXT
    if options.without:
        replace(mechanisms.get(options.without, {}))
        kinds = [recorded(*kind, options=options) for kind in options.recorded] or [answered(options)]
        print(json.dumps([figure for kind in kinds for figure in kind]))
        return
    print(f"{machine()}, one thread\n")
    all_of_them = measured(EVERYTHING)
    print("| without | " + " | ".join(all_of_them) + " |\n" + "|---" * (1 + len(all_of_them)) + "|")
    print_row("nothing", all_of_them, all_of_them)
    for name in options.mechanisms or mechanisms:
        print_row(name, measured(name), all_of_them)


if __name__ == "__main__":
    main()
