"""Replays of recorded answers with one thing changed at a time: the databases in use, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from hdtool.runtime.config import FIXED_BUDGET, SOURCE_LETTERS, DecodeConfig
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay import Contender
from hdtool.runtime.evaluation.replay_results import Played
from hdtool.runtime.evaluation.report.tables import Coverage, Covered, Share, Shares, Trial, Trials, wins_of
from hdtool.runtime.evaluation.worker_pool import replay
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.store_set import StoreSet

HIERARCHIES = ("hd-paper", "hd")
DATABASES = {"C": SourceName.CONTEXT, "M": SourceName.MODEL, "S": SourceName.CORPUS}


@dataclass(frozen=True)
class Study:
    """Recorded answers, the stores to draft from, and how many nodes a step of ``hd`` may have."""

    conversations: Sequence[Sequence[RecordedTurn]]
    store_set: StoreSet
    budget: int | None = None
    workers: int | None = None

    @property
    def nodes(self) -> int:
        """Of ``hd``, in a step, at most."""
        return FIXED_BUDGET if self.budget is None else self.budget

    @property
    def letters(self) -> str:
        """Of the databases that are there."""
        there = {"C": True, "M": self.store_set.model is not None, "S": self.store_set.corpus is not None}
        return "".join(letter for letter in SOURCE_LETTERS if there[letter])

    @cached_property
    def contenders(self) -> list[Contender]:
        """Both hierarchies with every choice of databases, the paper's also in every order."""
        choices = [(method, chosen) for method in HIERARCHIES for chosen in subsets_of(self.letters)]
        choices += [("hd-paper", order) for order in orders_of(self.letters)]
        return [self.contender(*choice) for choice in dict.fromkeys(choices)]

    def contender(self, method: str, databases: str) -> Contender:
        """With these databases, asked in this order."""
        order = databases + "".join(letter for letter in SOURCE_LETTERS if letter not in databases)
        config = DecodeConfig(method, budget=self.nodes, use=databases, order=order, lookahead=False)
        return Contender(_name(method, databases), config)

    @property
    def turns(self) -> int:
        """To be played in all."""
        return len(self.contenders) * sum(map(len, self.conversations))

    def results(self, told: Callable[[int], None] | None = None) -> Studied:
        """``told`` hears how many turns have been played by now."""
        played = replay(self.contenders, self.conversations, self.store_set, workers=self.workers, told=told)
        return Studied(self.letters, played)


@dataclass(frozen=True)
class Studied:
    """What the replays brought, in the tables of figures."""

    letters: str
    played: Mapping[str, Played]

    def whole(self, method: str) -> Played:
        """With all databases that are there."""
        return self.played[_name(method, self.letters)]

    def shares(self) -> tuple[Shares, ...]:
        return tuple(shares_of(method, self.whole(method)) for method in HIERARCHIES)

    def subsets(self) -> tuple[Trials, ...]:
        return tuple(self._trials(method, subsets_of(self.letters)) for method in HIERARCHIES)

    def orders(self) -> Trials | None:
        """None where there is but one."""
        return self._trials("hd-paper", orders_of(self.letters)) if len(self.letters) > 1 else None

    def coverage(self) -> tuple[Coverage, ...]:
        if len(self.letters) < 2:
            return ()
        singles = {
            method: {letter: self.played[_name(method, letter)] for letter in self.letters} for method in HIERARCHIES
        }
        return tuple(coverage_of(method, played) for method, played in singles.items())

    def _trials(self, method: str, choices: Sequence[str]) -> Trials:
        return Trials(method, tuple(_trial(choice, self.played[_name(method, choice)]) for choice in choices))


def subsets_of(letters: str) -> tuple[str, ...]:
    """The smaller first."""
    return tuple("".join(some) for size in range(1, len(letters) + 1) for some in combinations(letters, size))


def orders_of(letters: str) -> tuple[str, ...]:
    return tuple(map("".join, permutations(letters)))


def _name(method: str, databases: str) -> str:
    return f"{method} {databases}"


def _trial(databases: str, played: Played) -> Trial:
    return Trial(databases, played.tokens_per_step, played.nodes_per_step, played.draft_us(50))


def shares_of(method: str, played: Played) -> Shares:
    found = played.by_source().items()
    wins = Counter[int]()
    for turn in played.turns:
        wins += wins_of(turn.sources.tolist(), turn.accept_lengths.tolist())
    sources = {str(name): Share(one.drafted, one.accepted, one.hits, wins[name]) for name, one in found if one.drafted}
    return Shares(method, played.drafted_steps, sources)


def coverage_of(method: str, singles: Mapping[str, Played]) -> Coverage:
    """What each database had accepted as the only one, and what none of the others had."""
    tokens = np.concatenate([turn.tokens for turn in next(iter(singles.values())).turns])
    accepted = {
        letter: np.concatenate([turn.sources for turn in played.turns]) == DATABASES[letter]
        for letter, played in singles.items()
    }
    count = np.sum(list(accepted.values()), axis=0)
    words = {letter: set(tokens[own].tolist()) for letter, own in accepted.items()}
    covered = {}
    for letter, own in accepted.items():
        others = set[int]().union(*(said for other, said in words.items() if other != letter))
        covered[str(DATABASES[letter])] = Covered(
            positions=int(own.sum()),
            alone=int((own & (count == 1)).sum()),
            words=len(words[letter]),
            words_alone=len(words[letter] - others),
        )
    return Coverage(method, len(tokens), covered, nobody=int((count == 0).sum()))
