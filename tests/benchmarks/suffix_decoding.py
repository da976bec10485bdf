"""hd with its history beside SuffixDecoding (arctic-inference) that remembers earlier answers, on recorded answers.

    python -m tests.benchmarks.suffix_decoding TRACES --model MODEL [--raw] [--draft-tokens 32]

Both play all turns in the order of the file and remember every answer. Turn by turn the two take turns, so that a
change in the speed of the machine affects both. SuffixDecoding drafts trees at its default settings and at its most
generous ones. Its wheel needs CUDA; its drafting part builds alone from ``csrc/suffix_decoding`` of its sources.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from hdtool.data.traces import read_traces
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn, TurnReader
from hdtool.runtime.evaluation.replay import _play_turn as play_turn
from hdtool.runtime.evaluation.replay import follow
from hdtool.runtime.model.load import load_stops, load_tokenizer
from hdtool.runtime.stores.history import History
from hdtool.runtime.tree import DraftTree

SETTINGS: dict[str, dict[str, float]] = {
    "default": {"max_spec_factor": 1.0, "min_token_prob": 0.1},
    "generous": {"max_spec_factor": 8.0, "max_spec_offset": 8.0, "min_token_prob": 0.0},
}
WARM_UP = 5
"""Turns that are played once before, by drafters of their own."""


class SuffixDecoding:
    """A cache that remembers all answers, and what it drafted so far."""

    def __init__(self, most: int, settings: dict[str, float]) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self._cache = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=100_000)
        self._most, self._settings, self._turns = most, settings, 0
        self.tokens = self.steps = 0
        self.draft_us: list[float] = []
        self.learn_us: list[float] = []

    def play(self, turn: RecordedTurn) -> None:
        truth, name = turn.answer, self._turns
        self._turns += 1
        self._cache.start_request(name, np.array(turn.prompt, np.int32))
        context, done = np.array([*turn.prompt, *truth], np.int32), 1
        self._cache.add_active_response(name, truth[:1])
        self.steps += 1
        while done < len(truth):
            so_far = context[: len(turn.prompt) + done]
            started = time.perf_counter()
            draft = self._cache.speculate(
                name, so_far[-64:], max_spec_tokens=self._most, use_tree_spec=True, **self._settings
            )
            drafted = time.perf_counter()
            parents = np.array([int(parent) for parent in draft.parents], np.int32)
            tokens = np.array(draft.token_ids, np.int64)
            tree = DraftTree(int(so_far[-1]), tokens, parents, np.ones(len(tokens), np.uint8))
            accepted = follow(tree, truth[done:]).tokens
            learning = time.perf_counter()
            self._cache.add_active_response(name, accepted)
            self.learn_us.append((time.perf_counter() - learning) * 1e6)
            self.draft_us.append((drafted - started) * 1e6)
            done += len(accepted)
            self.steps += 1
        self.tokens += len(truth)
        self._cache.stop_request(name)


class Ours:
    """hd over the conversation and its history alone."""

    def __init__(self, most: int) -> None:
        self._drafter = Hierarchy(budget=FixedBudget(most), history=History())
        self.tokens = self.steps = 0
        self.draft_us: list[float] = []
        self.learn_us: list[float] = []

    def play(self, turn: RecordedTurn) -> None:
        played = play_turn(self._drafter, turn, lambda context: None)
        self.tokens += len(played.tokens)
        self.steps += len(played.accept_lengths)
        self.draft_us += (played.draft_seconds[1:] * 1e6).tolist()
        self.learn_us += (played.observe_seconds[1:] * 1e6).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--draft-tokens", type=int, default=32)
    given = parser.parse_args()
    loading = ModelConfig(model=given.model)
    tokenizer = load_tokenizer(loading)
    reader = TurnReader(
        tokenizer, load_stops(loading, tokenizer), tokenizer.eos_token_id, chat=False if given.raw else None
    )
    turns = [turn for trace in read_traces([given.traces], None) if trace.answers for turn in reader.turns(trace)]

    def contenders() -> dict[str, Any]:
        most = given.draft_tokens
        peers = {f"SuffixDecoding, {name}": SuffixDecoding(most, of) for name, of in SETTINGS.items()}
        return {"hd": Ours(most), **peers}

    warm, measured = contenders(), contenders()
    for turn in turns[:WARM_UP]:
        for one in warm.values():
            one.play(turn)
    for number, turn in enumerate(turns):
        names = list(measured)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured[name].play(turn)
    for name, one in measured.items():
        print(
            f"{name:26} {one.tokens / one.steps:6.3f} tokens per step, drafting {np.median(one.draft_us):6.1f} µs, "
            f"learning {np.median(one.learn_us):5.1f} µs (medians, {one.steps:,} steps)"
        )


if __name__ == "__main__":
    main()
