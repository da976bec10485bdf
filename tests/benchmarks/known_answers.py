"""Replays methods that read logits or hidden states on recorded answers, with one model pass per answer.

    hdtool collect --model MODEL --prompts question.jsonl --out traces.jsonl --max-new-tokens 128
    python -m tests.benchmarks.known_answers heads --model MODEL --traces traces.jsonl --heads FOLDER --heads FOLDER

A greedy answer tells which drafts are accepted, and one pass over the whole answer gives the logits and hidden states
of all accepted tokens. So tokens per step equal those of decoding with a fixed number of nodes. Recycled rankings
cannot be measured this way, because rejected nodes are not computed.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import logging

from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader, accept_recorded
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.config.decoding import METHODS, DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.heads.checkpoint import kind_of, method_of
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
LENGTHS = (60, 120, 500)
"""Prompt lengths, in tokens, at which groups begin."""


class Read(NamedTuple):
    """Recorded answer with the model's logits and hidden states."""

    turn: RecordedTurn
    logits: torch.Tensor
    """Logits from the last prompt token on."""
    hidden: torch.Tensor


class Counts:
    """Tokens, steps, drafts, and drafts with a match, of a group of answers."""

    def __init__(self) -> None:
        self.tokens = self.steps = self.drafts = self.found = 0

    def add(self, tokens: int, found: Sequence[bool]) -> None:
        self.tokens += tokens
        self.steps += 1 + len(found)  # the prefill is a step without drafts
        self.drafts += len(found)
        self.found += sum(found)


def read(target: Target, turn: RecordedTurn) -> Read:
    ids = torch.tensor([turn.prompt + turn.answer])
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits[0]
    return Read(turn, logits[len(turn.prompt) - 1 :].clone(), target.hidden.rows_of(0))


def replayed(drafter: Drafter, known: Read) -> list[bool]:
    """Return, for each step but the prefill, True if the draft has a node from a lookup or a head."""
    turn, found = known.turn, []
    length, done = len(turn.prompt), 1
    drafter.begin(turn.prompt)
    drafter.observe(Accepted([], turn.answer[:1]), Verified(known.logits[:1], known.hidden[:length]))
    while done < len(turn.answer):
        tree = drafter.draft([*turn.prompt, *turn.answer[:done]]).clipped(len(turn.answer) - done - 1)
        accepted = accept_recorded(tree, turn.answer[done:])
        at = length + done - 1
        rows = torch.tensor([0, *(node + 1 for node in accepted.path)])
        logits = spread(known.logits[done : done + len(rows)], rows, len(tree))
        drafter.observe(accepted, Verified(logits, spread(known.hidden[at : at + len(rows)], rows, len(tree))))
        found.append(has_match(tree))
        done += len(accepted.tokens)
    return found


def spread(values: torch.Tensor, rows: torch.Tensor, nodes: int) -> torch.Tensor:
    """Scatter the values of accepted rows into all rows of a tree; other rows are 0."""
    whole = values.new_zeros(1 + nodes, values.shape[-1])
    whole[rows] = values
    return whole


def has_match(tree: DraftTree) -> bool:
    """Return True unless all nodes are bare candidates of the last logits, without a lookup match."""
    return bool(np.any((tree.sources != SourceId.LAST) | (tree.parents != ROOT)))


def task_of(turn: RecordedTurn) -> str:
    return "mt_bench" if turn.category in MT_BENCH else turn.category


def length_group(tokens: int) -> str:
    bounds = [0, *LENGTHS]
    low = max(bound for bound in bounds if tokens >= bound)
    later = [bound for bound in LENGTHS if bound > low]
    return f"{low} to {later[0] - 1} tokens" if later else f"{low} tokens and more"


def table(title: str, groups: Sequence[str], numbers: dict[str, int]) -> None:
    heads = [f"{group} ({numbers[group]})" for group in groups]
    print(f"| {title} | " + " | ".join(heads) + " | found |")
    print("|---" * (len(groups) + 2) + "|")


def compare(turns: Sequence[Read], cases: dict[str, Drafter]) -> None:
    """Print tokens per step of each drafter by task and by prompt length."""
    lengths = [length_group(size) for size in (0, *LENGTHS)]
    groups = [*TASKS, *lengths, "all"]
    numbers = {group: sum(group in groups_of(known.turn) for known in turns) for group in groups}
    groups = [group for group in groups if numbers[group]]
    table("tokens per step", groups, numbers)
    for name, drafter in cases.items():
        counts: dict[str, Counts] = defaultdict(Counts)
        for known in turns:
            found = replayed(drafter, known)
            for group in groups_of(known.turn):
                counts[group].add(len(known.turn.answer), found)
        cells = [f"{counts[group].tokens / counts[group].steps:.3f}" for group in groups]
        every = counts["all"]
        print(f"| {name} | " + " | ".join(cells) + f" | {every.found / every.drafts:.1%} |", flush=True)


def groups_of(turn: RecordedTurn) -> tuple[str, str, str]:
    return task_of(turn), length_group(len(turn.prompt)), "all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("heads",))
    parser.add_argument("--model", required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--model-db")
    parser.add_argument("--corpus-db")
    parser.add_argument("--heads", action="append", default=[])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 32, 64])
    parser.add_argument("--turns", type=int)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    loading = ModelConfig(model=options.model, device="cpu", dtype="float32")
    loaded, reader = load(loading), TurnReader.of_model(loading)
    target = loaded.target
    traces = read_traces([options.traces])
    turns = [turn for trace in traces for turn in reader.turns(trace)][: options.turns]
    stores = StoresConfig(options.model_db, options.corpus_db)
    store_set = StoreSet.for_tokenizer(loaded.tokenizer, stores, model=checkpoint_of(loading))
    lengths = [len(turn.answer) for turn in turns]
    print(f"{machine()}, one thread; {len(turns)} answers, {sum(lengths):,} tokens; {store_set}")
    print(f"prompts have {statistics.median(len(turn.prompt) for turn in turns):.0f} tokens in the median\n")
    folders = {kind_of(Path(folder)): folder for folder in options.heads}
    alone = {kind: (method_of(kind), folder) for kind, folder in folders.items()}
    together = {f"hd+{kind}": (f"hd+{method}", folder) for kind, (method, folder) in alone.items()}
    methods = alone | {"hd": ("hd", "")} | {name: case for name, case in together.items() if case[0] in METHODS}
    cases: dict[str, Drafter] = {}
    for nodes in options.nodes:
        for name, (method, folder) in methods.items():
            heads = (folder,) if folder else ()
            config = DecodeConfig(method, draft_tokens=nodes, history="none", heads=heads)
            cases[f"{name}, {nodes} nodes"] = drafter_for(config, target, store_set)
    target.watch_hidden()
    compare([read(target, turn) for turn in turns], cases)


if __name__ == "__main__":
    main()
