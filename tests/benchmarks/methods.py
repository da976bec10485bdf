"""Replays all methods by task, cold and warm, as in the tables of docs/benchmarks/drafting.md.

    hdtool collect --model MODEL --prompts question.jsonl --out traces.jsonl --max-new-tokens 128 --rankings 61
    python -m tests.benchmarks.methods traces.jsonl --model MODEL --model-db FOLDER --corpus-db FOLDER

Cold means a fresh drafter per conversation; warm means one drafter for all conversations in file order, which keeps
what it learned. Methods that read logits take part if the recording has rankings. These cover accepted positions only,
so the figures of such methods are lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, replay_method
from hdtool.data.prompts import tasks_of
from hdtool.runtime.drafters.drafter_factory import DRAFTER_FACTORIES
from hdtool.runtime.drafters.published.suffix_decoding import SuffixConfig, SuffixDecoding
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import READ_LOGITS, TAKE_HISTORY, ReplayConfig
from hdtool.runtime.stores.store_set import StoreSet
from tests.benchmarks.laboratory import Conversations, Table, parser_of_recordings, read_recordings

GENEROUS = SuffixConfig(nodes_per_token=8.0, extra_nodes=8.0, min_prob=0.0)


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


def groups_of(result: ReplayResult) -> dict[str, float]:
    """Return tokens per step by task, or by category if all questions are from MT-bench."""
    categories = result.by_category()
    tasks: dict[str, list[ReplayResult]] = {}
    for task, one in zip(tasks_of(list(categories)), categories.values(), strict=True):
        tasks.setdefault(task, []).append(one)
    if len(tasks) > 1:
        return {name: ReplayResult.joined(parts).tokens_per_step for name, parts in tasks.items()}
    return {name: one.tokens_per_step for name, one in categories.items()}


def cells_of(result: ReplayResult, *, reads_logits: bool) -> list[str]:
    groups = [f"{value:.2f}" for value in groups_of(result).values()]
    # Omit learning times of these methods: ranking the rows that a recording lacks is slow.
    learning = "" if reads_logits else f"{result.observe_us(50):.0f}"
    times = f"{result.draft_us(50):.0f} / {result.draft_us(99):.0f}"
    return [*groups, f"**{result.tokens_per_step:.3f}**", f"{result.nodes_per_step:.1f}", times, learning]


def main() -> None:
    options = parser_of_recordings(__doc__, draft_tokens=32, methods=None).parse_args()
    torch.set_num_threads(1)
    conversations, stores = read_recordings(options)
    turns = [turn for one in conversations for turn in one]
    ranked = all(turn.rankings for turn in turns)
    config = ReplayConfig(tuple(options.methods.split(",")) if options.methods else (), options.draft_tokens)
    tokens = sum(len(turn.answer) for turn in turns)
    print(f"{machine()}, one thread; {len(conversations)} conversations, {tokens:,} tokens; {stores}\n")
    for title, how in (("cold", cold), ("warm", warm)):
        table: Table | None = None
        for name in config.methods_with(corpus=stores.corpus is not None, rankings=ranked):
            if how is warm and name not in TAKE_HISTORY:
                continue
            method, reads_logits = ReplayMethod(name, config.decoding(name)), name in READ_LOGITS
            results = {f"`{name}`": how(method, conversations, stores)}
            if name == "suffix":
                with generous():
                    results["`suffix`, most generous"] = how(method, conversations, stores)
            for label, one in results.items():
                table = table or Table(
                    title, *groups_of(one), "all", "nodes per step", "drafting, µs p50 / p99", "learning, µs p50"
                )
                table.row(label, *cells_of(one, reads_logits=reads_logits))
        print()


if __name__ == "__main__":
    main()
