"""Estimates what cost curves by activated experts could gain over curves by rows.

    python -m tests.benchmarks.experts --recorded traces.jsonl MODEL

Recorded answers are replayed by ``hd`` with a virtual clock: a pass over n rows reads the dense weights and the experts
that its rows activate, fewer than for independent rows by the given overlap. Budgets start from passes over independent
rows, as they are measured before an answer, and adapt to the virtual passes. ``known`` starts from the true overlap, an
upper bound for curves by activated experts. Speeds are relative to plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from hdtool.builders.evaluation.estimated_passes import distinct_experts
from hdtool.builders.evaluation.recording import RecordedTurn, RecordingEngine, TurnReader
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import MeasuredBudget
from hdtool.runtime.budget.pass_costs import PASS_SIZES, MeasuredCosts
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.config.decoding import ReplayConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.engine_interface import PassOptions, WaitForResults
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.stores.store_set import StoreSet
from tests.benchmarks.laboratory import Table, parser_of

PLAIN = 10.0
"""Milliseconds of a simulated pass over one row."""
ROW, NOISE = 0.002, 0.05
"""Cost of each further row relative to ``PLAIN``, and relative standard deviation of the number of activated experts.
"""
MIXTURES = (8, 2), (32, 4), (128, 8)
EXPERT_SHARES = 0.5, 0.8
"""Shares of a plain pass spent on reading experts."""
OVERLAPS = 0.0, 0.3, 0.6


@dataclass(frozen=True)
class Simulated:
    """Simulated model with MoE layers."""

    experts: int
    top: int
    share: float
    overlap: float

    def milliseconds(self, rows: int, overlap: float, factor: float = 1.0) -> float:
        active_experts = distinct_experts(rows, self.top, self.experts, overlap) * factor
        active_experts = min(self.experts, max(self.top, active_experts))
        return PLAIN * (1 - self.share + self.share * active_experts / self.top + ROW * (rows - 1))

    def curve(self, overlap: float) -> CostCurve:
        return CostCurve(
            tuple(rows - 1 for rows in PASS_SIZES), (tuple(self.milliseconds(rows, overlap) for rows in PASS_SIZES),)
        )


class VirtualEngine(RecordingEngine):
    """Engine that replays recorded answers and counts the time of simulated passes."""

    def __init__(self, mixture: Simulated) -> None:
        super().__init__()
        self._mixture, self._random, self.milliseconds = mixture, np.random.default_rng(0), 0.0

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> WaitForResults:
        results, rows = super().launch(cache, trees, options), len(trees[0]) + 1
        factor = self._random.normal(1.0, NOISE) if rows > 1 else 1.0
        taken = self._mixture.milliseconds(rows, self._mixture.overlap, factor)
        self.log.last_seconds = taken / 1e3
        self.milliseconds += taken
        return results


class VirtualBudget(MeasuredBudget):
    """Budget that counts pass time only, because no clock measures the drafting here."""

    def set_draft_seconds(self, seconds: float) -> None:
        pass

    def _measure_overhead(self) -> None:
        pass


def simulated(mixture: Simulated, curve: CostCurve, conversations: Sequence[Sequence[RecordedTurn]]) -> float:
    """Return the speedup over plain decoding, with a new drafter and budget per conversation."""
    config, tokens, taken = ReplayConfig(("hd",), None).decoding("hd"), 0, 0.0
    for turns in conversations:
        engine = VirtualEngine(mixture)
        budget = VirtualBudget(engine.log, MeasuredCosts(engine.log, curve), overhead=0.0)
        drafter = drafter_with_budget(lambda budget=budget: budget, config, StoreSet())  # type: ignore[misc]
        for turn in turns:
            engine.answer(turn)
            sampler, max_new_tokens = Sampler(SamplingConfig(), turn.prompt), len(turn.answer)
            room = max_new_tokens + LARGEST_TREE + 1
            made = 0
            for step in decode(
                engine, turn.prompt, sampler, max_new_tokens=room, drafter=drafter, prefix_caching=False
            ):
                made += len(step.tokens)
                if made >= max_new_tokens:
                    break
            tokens += made - 1  # the first token comes from the prefill
        taken += engine.milliseconds
    return tokens * PLAIN / taken


def print_simulated(traces: str, model: str, limit: int, *, raw: bool) -> None:
    reader = TurnReader.of_model(ModelConfig(model=model), False if raw else None)
    answered = [trace for trace in read_traces([Path(traces)]) if trace.answers][:limit]
    conversations = [reader.turns(trace) for trace in answered]
    table = Table("experts", "share of experts", "overlap", "by rows", "known", "gain")
    for (experts, top), share, overlap in product(MIXTURES, EXPERT_SHARES, OVERLAPS):
        mixture = Simulated(experts, top, share, overlap)
        speeds = [simulated(mixture, mixture.curve(known), conversations) for known in (0.0, overlap)]
        figures = (*(f"{speed:.3f}" for speed in speeds), f"{speeds[1] / speeds[0] - 1:+.1%}")
        table.row(f"{top} of {experts}", f"{share:.0%}", f"{overlap:.0%}", *figures)


def main() -> None:
    parser = parser_of(__doc__, raw=False, limit=10)
    parser.add_argument("--recorded", nargs=2, required=True, metavar=("TRACES", "MODEL"))
    options = parser.parse_args()
    traces, model = options.recorded
    print_simulated(traces, model, options.limit, raw=options.raw)


if __name__ == "__main__":
    main()
