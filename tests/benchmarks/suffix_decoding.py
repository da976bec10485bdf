"""Compares hd and its history with SuffixDecoding (arctic-inference) on recorded answers.

    python -m tests.benchmarks.suffix_decoding TRACES --model MODEL [--raw] [--draft-tokens 32]

Both replay all turns in file order and remember every answer. They alternate turn by turn, so that drifts of machine
speed affect both. SuffixDecoding drafts trees with its default settings and with its most generous ones. Its wheel
needs CUDA; its drafting part builds separately from ``csrc/suffix_decoding`` of its sources.

A draft includes the attention mask of its tree. Learning is what a step adds once its tokens are known. The last column
is the total time of a turn (prompt, drafts and learning) divided by its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np

from hdtool.builders.evaluation.experiment import rotated
from hdtool.builders.evaluation.recording import RecordedTurn, RecordingEngine
from hdtool.builders.evaluation.replay import ReplayedTurn, Replayer, ReplayResult
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, WrappedDrafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.stores.history_store import History
from tests.benchmarks.laboratory import Table, parser_of_recordings, read_recordings, seconds_of

SETTINGS: dict[str, dict[str, float]] = {
    "default": {"max_spec_factor": 1.0, "min_token_prob": 0.1},
    "generous": {"max_spec_factor": 8.0, "max_spec_offset": 8.0, "min_token_prob": 0.0},
}
WARM_UP = 5
"""Number of turns that separate drafters replay first."""
MAX_DEPTH = 64


class SuffixDecoding(Drafter):
    """SuffixDecoding with a cache that remembers all answers."""

    def __init__(self, max_nodes: int, settings: dict[str, float]) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self._cache = SuffixDecodingCache(max_tree_depth=MAX_DEPTH, max_cached_requests=100_000)
        self._max_nodes, self._settings, self._request = max_nodes, settings, 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._request += 1
        self._cache.start_request(self._request, np.array(prompt, np.int32))

    def draft(self, context: Sequence[int]) -> DraftTree:
        recent = np.array(context[-MAX_DEPTH:], np.int32)
        drafted = self._cache.speculate(
            self._request, recent, max_spec_tokens=self._max_nodes, use_tree_spec=True, **self._settings
        )
        return DraftTree.of(context[-1], drafted.token_ids, drafted.parents)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self._cache.add_active_response(self._request, accepted.tokens)

    def end(self) -> None:
        self._cache.stop_request(self._request)


class Player(WrappedDrafter):
    """Replays turns with a drafter, and times what it does between them."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._between = 0.0
        self._replayer = Replayer(self, RecordingEngine())

    def begin(self, prompt: Sequence[int]) -> None:
        self._between = seconds_of(lambda: super(Player, self).begin(prompt))

    def end(self) -> None:
        self._between += seconds_of(super().end)

    def play(self, turn: RecordedTurn) -> tuple[ReplayedTurn, float]:
        """Return the replayed turn, and the seconds that the drafter took in it."""
        replayed = self._replayer.replay(turn)
        return replayed, self._between + float(replayed.draft_seconds.sum() + replayed.observe_seconds.sum())


def players(max_nodes: int) -> dict[str, Player]:
    drafters: dict[str, Drafter] = {"hd": Hierarchy(budget=FixedBudget(max_nodes), history=History())}
    drafters |= {f"SuffixDecoding, {name}": SuffixDecoding(max_nodes, of) for name, of in SETTINGS.items()}
    return {name: Player(drafter) for name, drafter in drafters.items()}


def main() -> None:
    options = parser_of_recordings(__doc__, draft_tokens=32).parse_args()
    conversations, _ = read_recordings(options)
    turns = [turn for one in conversations for turn in one]
    for player in players(options.draft_tokens).values():
        for turn in turns[:WARM_UP]:
            player.play(turn)
    found: dict[str, list[tuple[ReplayedTurn, float]]] = defaultdict(list)
    measured = players(options.draft_tokens)
    for number, turn in enumerate(turns):
        for name in rotated(list(measured), number):
            found[name].append(measured[name].play(turn))
    table = Table("method", "tokens per step", "draft, µs", "learning, µs", "a step of a turn, µs")
    for name in measured:
        result = ReplayResult(name, tuple(replayed for replayed, _ in found[name]), {})
        step = median(1e6 * seconds / len(replayed.nodes) for replayed, seconds in found[name])
        medians = (f"{value:.1f}" for value in (result.draft_us(50), result.observe_us(50), step))
        table.row(name, f"{result.tokens_per_step:.3f}", *medians)


if __name__ == "__main__":
    main()
