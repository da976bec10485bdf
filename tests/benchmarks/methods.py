"""Replays all methods by task, cold and warm, as in the tables of docs/benchmarks/methods.md.

    hdtool collect --model MODEL --prompts question.jsonl --out traces.jsonl --max-new-tokens 128 --rankings 61
    python -m tests.benchmarks.methods traces.jsonl --model MODEL --model-db FOLDER --corpus-db FOLDER

Cold means a fresh drafter per conversation; warm means one drafter for all conversations in file order, which keeps
what it learned. Methods that read logits take part if the recording has rankings. These cover accepted positions only,
so the figures of such methods are lower bounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, replay_method
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.config.decoding import METHODS, ReplayConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.drafters.methods import DRAFTER_FACTORIES
from hdtool.runtime.drafters.published.suffix_decoding import SuffixConfig, SuffixDecoding
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of
from tests.benchmarks.known_answers import MT_BENCH, task_of

GENEROUS = SuffixConfig(nodes_per_token=8.0, extra_nodes=8.0, min_prob=0.0)

Conversations = Sequence[Sequence[RecordedTurn]]
"""Turns of each conversation."""


def cold(contender: ReplayMethod, conversations: Conversations, stores: StoreSet) -> ReplayResult:
    return ReplayResult.joined([replay_method(contender, turns, stores) for turns in conversations])


def warm(contender: ReplayMethod, conversations: Conversations, stores: StoreSet) -> ReplayResult:
    return replay_method(contender, [turn for turns in conversations for turn in turns], stores)


@contextmanager
def generous() -> Iterator[None]:
    """Let SuffixDecoding draft with the settings that give it the most tokens per step."""
    usual = DRAFTER_FACTORIES["suffix"]
    DRAFTER_FACTORIES["suffix"] = lambda config, stores, budget, target: SuffixDecoding(budget(), GENEROUS)
    try:
        yield
    finally:
        DRAFTER_FACTORIES["suffix"] = usual


def groups_of(played: ReplayResult) -> dict[str, float]:
    """Return tokens per step by task, or by category if all questions are from MT-bench."""
    categories = played.by_category()
    if set(categories) <= MT_BENCH:
        return {name: one.tokens_per_step for name, one in categories.items()}
    tasks: dict[str, list[ReplayResult]] = {}
    for one in categories.values():
        tasks.setdefault(task_of(RecordedTurn("", one.turns[0].category, 0, [], [])), []).append(one)
    return {name: ReplayResult.joined(parts).tokens_per_step for name, parts in tasks.items()}


def row_of(label: str, played: ReplayResult, *, reads_logits: bool) -> str:
    groups = " | ".join(f"{value:.2f}" for value in groups_of(played).values())
    # Omit learning times of these methods: ranking the rows that a recording lacks is slow.
    learning = "" if reads_logits else f"{played.observe_us(50):.0f}"
    times = f"{played.draft_us(50):.0f} / {played.draft_us(99):.0f} | {learning}"
    return f"| {label} | {groups} | **{played.tokens_per_step:.3f}** | {played.nodes_per_step:.1f} | {times} |"


def parser_of_recordings(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-db", default="none")
    parser.add_argument("--corpus-db", default="none")
    return parser


def read_recordings(options: argparse.Namespace, *, chat: bool | None = None) -> tuple[Conversations, StoreSet]:
    """Return the recorded conversations and the stores to draft from."""
    loading = ModelConfig(model=options.model)
    reader = TurnReader.of_model(loading, chat)
    conversations = [reader.turns(trace) for trace in read_traces([options.traces]) if trace.answers]
    stores = StoreSet.for_tokenizer(
        reader.tokenizer, StoresConfig(options.model_db, options.corpus_db), model=checkpoint_of(loading)
    )
    return conversations, stores


def main() -> None:
    parser = parser_of_recordings(__doc__)
    parser.add_argument("--draft-tokens", type=int, default=32)
    parser.add_argument("--methods")
    parser.add_argument("--raw", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    conversations, stores = read_recordings(options, chat=False if options.raw else None)
    turns = [turn for one in conversations for turn in one]
    ranked = all(turn.rankings for turn in turns)
    config = ReplayConfig(tuple(options.methods.split(",")) if options.methods else (), options.draft_tokens)
    tokens = sum(len(turn.answer) for turn in turns)
    print(f"{machine()}, one thread; {len(conversations)} conversations, {tokens:,} tokens; {stores}\n")
    for title, how in (("cold", cold), ("warm", warm)):
        head = ""
        for name in config.methods_with(corpus=stores.corpus is not None, rankings=ranked):
            if how is warm and not METHODS[name].history:
                continue
            played = how(ReplayMethod(name, config.decoding(name)), conversations, stores)
            if not head:
                names = [
                    title,
                    *groups_of(played),
                    "all",
                    "nodes per step",
                    "drafting, µs p50 / p99",
                    "learning, µs p50",
                ]
                head = "| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|"
                print(head)
            print(row_of(f"`{name}`", played, reads_logits=bool(METHODS[name].logits)), flush=True)
            if name == "suffix":
                with generous():
                    played = how(ReplayMethod(name, config.decoding(name)), conversations, stores)
                print(row_of("`suffix`, most generous", played, reads_logits=False), flush=True)
        print()


if __name__ == "__main__":
    main()
