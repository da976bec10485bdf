"""Results of a replay: per turn and per step, and the sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.source_names import SourceName

Ints = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReplayedTurn:
    """The steps in which a method would have made a recorded answer. The first step is the pass over the prompt."""

    conversation: str
    category: str
    number: int
    prompt_tokens: int
    tokens: Ints
    """The answer."""
    sources: Ints
    """Per token: the ``SourceName`` that drafted it; NONE for a bonus token."""
    accept_lengths: Ints
    """Per step: the accepted tokens and the bonus token."""
    nodes: Ints
    """Per step: the size of its draft tree."""
    draft_seconds: Floats
    """Per step: drafting, the tree's mask and its positions."""
    observe_seconds: Floats
    """Per step: the drafter's ``observe``."""
    drafted: Ints
    """Drafted nodes per source."""
    hits: Ints
    """Steps in which a source drafted anything, per source."""

    @property
    def tokens_per_step(self) -> float:
        return len(self.tokens) / len(self.accept_lengths)

    @property
    def contexts(self) -> Ints:
        """Per step: the tokens in the KV cache before its pass."""
        return self.prompt_tokens + np.cumsum(self.accept_lengths) - self.accept_lengths


@dataclass(frozen=True)
class SourceShare:
    """Counts of one source."""

    drafted: int
    accepted: int
    hits: int
    unique: int
    """Distinct accepted tokens."""
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Tokens per second, computed from the cost of forward passes."""

    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def pays(self) -> bool:
        return self.speedup > 1


@dataclass(frozen=True)
class ReplayResult:
    """All turns of one method."""

    method: str
    turns: tuple[ReplayedTurn, ...]
    source_seconds: Mapping[SourceName, float]
    history: bool = False
    """Whether the method drafted from the answers before."""
    warm_tokens: int = 0
    """Tokens of answers that were replayed before and are not counted."""

    @classmethod
    def joined(cls, parts: Sequence[ReplayResult]) -> ReplayResult:
        """The parts of one method's replay, in the order given."""
        seconds = dict.fromkeys((source for part in parts for source in part.source_seconds), 0.0)
        for part in parts:
            for source, taken in part.source_seconds.items():
                seconds[source] += taken
        return replace(parts[0], turns=tuple(turn for part in parts for turn in part.turns), source_seconds=seconds)

    @cached_property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @cached_property
    def steps(self) -> int:
        return sum(len(turn.accept_lengths) for turn in self.turns)

    @cached_property
    def nodes(self) -> int:
        return sum(int(turn.nodes.sum()) for turn in self.turns)

    @property
    def drafted_steps(self) -> int:
        """All steps but the passes over prompts, for which nothing is drafted."""
        return self.steps - len(self.turns)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / max(1, self.drafted_steps)

    @property
    def accepted_share(self) -> float:
        """Accepted tokens over drafted nodes."""
        return (self.tokens - self.steps) / max(1, self.nodes)

    def draft_us(self, percentile: float) -> float:
        """A percentile of a step's drafting time, mask and positions included, in microseconds."""
        return _percentile([turn.draft_seconds[1:] for turn in self.turns], percentile)

    def observe_us(self, percentile: float) -> float:
        return _percentile([turn.observe_seconds[1:] for turn in self.turns], percentile)

    def by_category(self) -> dict[str, ReplayResult]:
        """One result per category, without the times of the sources."""
        names = dict.fromkeys(turn.category for turn in self.turns)
        return {
            name: replace(self, turns=tuple(turn for turn in self.turns if turn.category == name), source_seconds={})
            for name in names
        }

    def by_source(self) -> dict[SourceName, SourceShare]:
        """The counts of each source that drafted anything or took any time."""
        drafted = sum((turn.drafted for turn in self.turns), np.zeros(len(SourceName), np.int64))
        hits = sum((turn.hits for turn in self.turns), np.zeros(len(SourceName), np.int64))
        tokens = np.concatenate([turn.tokens for turn in self.turns])
        origins = np.concatenate([turn.sources for turn in self.turns])
        shares = {}
        for source in SourceName:
            seconds = self.source_seconds.get(source, 0.0)
            if source and (drafted[source] or seconds):
                taken = tokens[origins == source]
                shares[source] = SourceShare(
                    int(drafted[source]), len(taken), int(hits[source]), len(np.unique(taken)), seconds
                )
        return shares

    def predict(self, curve: CostCurve) -> Prediction:
        """Tokens per second with passes of this cost; the pass over a prompt counts as one without drafts."""
        plain = drafting = 0.0
        for turn in self.turns:
            places = turn.prompt_tokens + np.arange(len(turn.tokens))
            plain += float(curve.of_passes(np.zeros(len(places)), places).sum())
            passes = curve.of_passes(turn.nodes, turn.contexts)
            drafting += float(passes.sum() + turn.draft_seconds.sum() + turn.observe_seconds.sum())
        return Prediction(self.tokens / drafting, self.tokens / plain)


def _percentile(seconds: Sequence[Floats], percentile: float) -> float:
    every = np.concatenate(seconds)
    return float(np.percentile(every, percentile)) * 1e6 if len(every) else 0.0
