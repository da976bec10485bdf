"""Ablations: replays of recorded answers with different sources, and in different orders of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import FIXED_BUDGET, SOURCE_LETTERS, DecodeConfig
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay import Contender
from hdtool.runtime.evaluation.replay_results import ReplayResult
from hdtool.runtime.evaluation.report.tables import Coverage, Covered, Share, Shares, Trial, Trials, wins_of
from hdtool.runtime.evaluation.worker_pool import replay
from hdtool.runtime.source_names import source_of
from hdtool.runtime.stores.store_set import StoreSet

HIERARCHIES = ("hd-paper", "hd")


@dataclass(frozen=True)
class Study:
    """Recorded answers, the stores to draft from, and the number of draft tokens per step."""

    conversations: Sequence[Sequence[RecordedTurn]]
    store_set: StoreSet
    budget: int | None = None
    workers: int | None = None
    curve: CostCurve | None = None
    """Decides how many draft tokens pay where no number is given."""

    @property
    def draft_tokens(self) -> str:
        """The draft tokens of a step, in words."""
        if self.budget is None and self.curve:
            return "as many draft tokens a step as pay"
        return f"at most {FIXED_BUDGET if self.budget is None else self.budget} draft tokens a step"

    @property
    def letters(self) -> str:
        """The letters of the available sources."""
        there = {"C": True, "M": self.store_set.model is not None, "S": self.store_set.corpus is not None}
        return "".join(letter for letter in SOURCE_LETTERS if there[letter])

    @cached_property
    def contenders(self) -> list[Contender]:
        """Both hierarchies with every subset of sources, ``hd-paper`` also in every order."""
        choices = [(method, chosen) for method in HIERARCHIES for chosen in subsets_of(self.letters)]
        choices += [("hd-paper", order) for order in orders_of(self.letters)]
        return [self.contender(*choice) for choice in dict.fromkeys(choices)]

    def contender(self, method: str, sources: str) -> Contender:
        """A method with these sources, in this order of look-up."""
        order = sources + "".join(letter for letter in SOURCE_LETTERS if letter not in sources)
        config = DecodeConfig(method, draft_tokens=self.budget, sources=sources, order=order, lookahead=False)
        return Contender(_name(method, sources), config, self.curve)

    @property
    def turns(self) -> int:
        """The number of turns over all replays."""
        return len(self.contenders) * sum(map(len, self.conversations))

    def results(self, on_progress: Callable[[int], None] = lambda done: None) -> StudyResults:
        """Run all replays; ``on_progress`` receives the number of turns done so far."""
        played = replay(
            self.contenders, self.conversations, self.store_set, workers=self.workers, on_progress=on_progress
        )
        return StudyResults(self.letters, played)


@dataclass(frozen=True)
class StudyResults:
    """The results of the replays, as data of figures."""

    letters: str
    results: Mapping[str, ReplayResult]

    def whole(self, method: str) -> ReplayResult:
        """The replay with all available sources."""
        return self.results[_name(method, self.letters)]

    def shares(self) -> tuple[Shares, ...]:
        return tuple(shares_of(method, self.whole(method)) for method in HIERARCHIES)

    def subsets(self) -> tuple[Trials, ...]:
        return tuple(self._trials(method, subsets_of(self.letters)) for method in HIERARCHIES)

    def orders(self) -> Trials | None:
        """None if there is only one source."""
        return self._trials("hd-paper", orders_of(self.letters)) if len(self.letters) > 1 else None

    def coverage(self) -> tuple[Coverage, ...]:
        if len(self.letters) < 2:
            return ()
        return tuple(
            coverage_of(method, {letter: self.results[_name(method, letter)] for letter in self.letters})
            for method in HIERARCHIES
        )

    def _trials(self, method: str, choices: Sequence[str]) -> Trials:
        found = ((choice, self.results[_name(method, choice)]) for choice in choices)
        rows = (Trial(one, done.tokens_per_step, done.nodes_per_step, done.draft_us(50)) for one, done in found)
        return Trials(method, tuple(rows))


def subsets_of(letters: str) -> tuple[str, ...]:
    """The smaller ones first."""
    return tuple("".join(some) for size in range(1, len(letters) + 1) for some in combinations(letters, size))


def orders_of(letters: str) -> tuple[str, ...]:
    return tuple(map("".join, permutations(letters)))


def _name(method: str, sources: str) -> str:
    return f"{method} {sources}"


def shares_of(method: str, result: ReplayResult) -> Shares:
    counts = result.by_source().items()
    wins = Counter[int]()
    for turn in result.turns:
        wins += wins_of(turn.sources.tolist(), turn.accept_lengths.tolist())
    sources = {str(name): Share(one.drafted, one.accepted, one.hits, wins[name]) for name, one in counts if one.drafted}
    return Shares(method, result.drafted_steps, sources)


def coverage_of(method: str, singles: Mapping[str, ReplayResult]) -> Coverage:
    """The tokens accepted from each source as the only one, and those that no other had."""
    tokens = np.concatenate([turn.tokens for turn in next(iter(singles.values())).turns])
    accepted = {
        letter: np.concatenate([turn.sources for turn in result.turns]) == source_of(letter)
        for letter, result in singles.items()
    }
    count = np.sum(list(accepted.values()), axis=0)
    words = {letter: set(tokens[own].tolist()) for letter, own in accepted.items()}
    covered = {}
    for letter, own in accepted.items():
        others = set[int]().union(*(found for other, found in words.items() if other != letter))
        covered[str(source_of(letter))] = Covered(
            positions=int(own.sum()),
            alone=int((own & (count == 1)).sum()),
            words=len(words[letter]),
            words_alone=len(words[letter] - others),
        )
    return Coverage(method, len(tokens), covered, nobody=int((count == 0).sum()))
