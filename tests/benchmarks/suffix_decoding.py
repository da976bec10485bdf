"""Compares hd and its history with SuffixDecoding (arctic-inference) on recorded answers.

    python -m tests.benchmarks.suffix_decoding TRACES --model MODEL [--raw] [--draft-tokens 32]

Both replay all turns in file order and remember every answer. They alternate turn by turn, so that drifts of machine
speed affect both. SuffixDecoding drafts trees with its default settings and with its most generous ones. Its wheel
needs CUDA; its drafting part builds separately from ``csrc/suffix_decoding`` of its sources.

A draft ends with the arrays of a tree (hd) or with lists of tokens and parents (SuffixDecoding). The tree's attention
mask is equal work for both and is timed separately. Learning is what a step adds once its tokens are known. The last
figure is the total time of a turn (prompt, drafts and learning) divided by its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader, accept_recorded
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.target.load import load_stops, load_tokenizer

SETTINGS: dict[str, dict[str, float]] = {
    "default": {"max_spec_factor": 1.0, "min_token_prob": 0.1},
    "generous": {"max_spec_factor": 8.0, "max_spec_offset": 8.0, "min_token_prob": 0.0},
}
WARM_UP = 5
"""Number of turns that separate drafters replay first."""
MAX_DEPTH = 64
NO_LOGITS = Verified(torch.empty(0))
WINDOWS, CPU = [AttentionWindow(FULL)], torch.device("cpu")


class Peer(Protocol):
    """Common interface. ``context`` and ``tree`` convert the input and output of ``draft`` and are not timed."""

    def start(self, prompt: list[int]) -> None: ...

    def context(self, tokens: list[int]) -> Any: ...

    def draft(self, context: Any) -> Any: ...

    def tree(self, drafted: Any, root: int) -> DraftTree: ...

    def learn(self, accepted: Accepted) -> None: ...

    def stop(self) -> None: ...


class SuffixDecoding:
    """SuffixDecoding with a cache that remembers all answers."""

    def __init__(self, max_nodes: int, settings: dict[str, float]) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self._cache = SuffixDecodingCache(max_tree_depth=MAX_DEPTH, max_cached_requests=100_000)
        self._max_nodes, self._settings, self._request = max_nodes, settings, 0

    def start(self, prompt: list[int]) -> None:
        self._request += 1
        self._cache.start_request(self._request, np.array(prompt, np.int32))

    def context(self, tokens: list[int]) -> Any:
        return np.array(tokens[-MAX_DEPTH:], np.int32)

    def draft(self, context: Any) -> Any:
        return self._cache.speculate(
            self._request, context, max_spec_tokens=self._max_nodes, use_tree_spec=True, **self._settings
        )

    def tree(self, drafted: Any, root: int) -> DraftTree:
        return DraftTree.of(root, drafted.token_ids, drafted.parents)

    def learn(self, accepted: Accepted) -> None:
        self._cache.add_active_response(self._request, accepted.tokens)

    def stop(self) -> None:
        self._cache.stop_request(self._request)


class HierarchyPeer:
    """hd that drafts from the conversation and its history alone."""

    def __init__(self, max_nodes: int) -> None:
        self._drafter = Hierarchy(budget=FixedBudget(max_nodes), history=History())
        self.start, self.draft, self.stop = self._drafter.begin, self._drafter.draft, self._drafter.end

    def context(self, tokens: list[int]) -> Any:
        return tokens

    def tree(self, drafted: Any, root: int) -> DraftTree:
        return drafted  # type: ignore[no-any-return]

    def learn(self, accepted: Accepted) -> None:
        self._drafter.observe(accepted, NO_LOGITS)


class Player:
    """Replays turns with one peer and times it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.tokens = self.steps = 0
        self.draft_us: list[float] = []
        self.mask_us: list[float] = []
        self.learn_us: list[float] = []
        self.turn_us: list[float] = []
        """Per turn: total time of the drafter divided by steps."""

    def play(self, turn: RecordedTurn) -> None:
        peer, truth, masks = self._peer, turn.answer, AttentionMasks(WINDOWS, torch.float32, CPU)
        context, learned = [*turn.prompt, truth[0]], len(self.learn_us)
        spent, _ = timed(peer.start, turn.prompt)
        self.learn_us.append(timed(peer.learn, Accepted([], truth[:1]))[0])
        done, steps = 1, 1
        while done < len(truth):
            draft_us, drafted = timed(peer.draft, peer.context(context))
            tree = peer.tree(drafted, context[-1])
            mask_us, _ = timed(masks.of_trees, [tree], [len(context) - 1])
            accepted = accept_recorded(tree, truth[done:])
            self.learn_us.append(timed(peer.learn, accepted)[0])
            self.draft_us.append(draft_us)
            self.mask_us.append(mask_us)
            spent += draft_us
            context += accepted.tokens
            done, steps = done + len(accepted.tokens), steps + 1
        spent += sum(self.learn_us[learned:]) + timed(peer.stop)[0]
        self.turn_us.append(spent / steps)
        self.tokens, self.steps = self.tokens + len(truth), self.steps + steps

    def report(self) -> str:
        return (
            f"{self.tokens / self.steps:6.3f} tokens per step; drafting {np.median(self.draft_us):6.1f} µs, "
            f"mask {np.median(self.mask_us):5.1f} µs, learning {np.median(self.learn_us):5.1f} µs (medians of "
            f"{self.steps:,} steps); a step of a turn {np.median(self.turn_us):6.1f} µs (median of the turns)"
        )


def timed(function: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Return the microseconds that a call takes, and its result."""
    started = time.perf_counter()
    returned = function(*given)
    return (time.perf_counter() - started) * 1e6, returned


def turns_of(given: argparse.Namespace) -> Sequence[RecordedTurn]:
    loading = ModelConfig(model=given.model)
    tokenizer = load_tokenizer(loading)
    reader = TurnReader(
        tokenizer, load_stops(loading, tokenizer), tokenizer.eos_token_id, chat=False if given.raw else None
    )
    return [turn for trace in read_traces([given.traces], None) if trace.answers for turn in reader.turns(trace)]


def contenders(max_nodes: int) -> dict[str, Player]:
    peers: dict[str, Peer] = {f"SuffixDecoding, {name}": SuffixDecoding(max_nodes, of) for name, of in SETTINGS.items()}
    return {name: Player(peer) for name, peer in ({"hd": HierarchyPeer(max_nodes)} | peers).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--draft-tokens", type=int, default=32)
    given = parser.parse_args()
    turns = turns_of(given)
    warm, measured = contenders(given.draft_tokens), contenders(given.draft_tokens)
    for turn in turns[:WARM_UP]:
        for player in warm.values():
            player.play(turn)
    for number, turn in enumerate(turns):
        names = list(measured)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            measured[name].play(turn)
    for name, player in measured.items():
        print(f"{name:26} {player.report()}")


if __name__ == "__main__":
    main()
