"""How often each source drafted, and how often its drafts were accepted, in measured and in replayed answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from hdtool.builders.evaluation.replay import ReplayResult
from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.runtime.settings.draft_sources import source_of


@dataclass(frozen=True)
class SourceCounts:
    """What one source drafted in all steps of a method, and how much of it was accepted."""

    drafted: int
    accepted: int
    hits: int
    """Number of steps in which the source drafted anything."""
    wins: int
    """Number of steps in which at least one token of the source was accepted."""

    @property
    def acceptance_rate(self) -> float:
        """Ratio of accepted to drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def win_rate(self) -> float:
        """Ratio of steps with an accepted token to steps with a draft."""
        return self.wins / self.hits if self.hits else 0.0


@dataclass(frozen=True)
class SourceShares:
    """Counts of each source over the steps of one method; ``steps`` is the number of steps, excluding prefills."""

    method: str
    steps: int
    sources: Mapping[str, SourceCounts]


def measured_shares(method: str, rows: Sequence[AnsweredQuestion]) -> SourceShares:
    """Return the shares of the sources in a method's answers to the questions of a benchmark."""
    turns = [turn for row in rows for turn in row.turns if turn.output_ids]
    names = dict.fromkeys(name for turn in turns for name, counts in turn.sources.items() if counts["drafted"])
    wins = Counter[int]()
    for turn in turns:
        wins += source_wins(turn.drafted_by, turn.step_tokens)
    sources = {}
    for name in names:
        drafted, accepted, hits = (
            int(sum(turn.sources.get(name, {}).get(key, 0) for turn in turns))
            for key in ("drafted", "accepted", "hits")
        )
        sources[name] = SourceCounts(drafted, accepted, hits, wins[source_of(name)])
    # The first step is the prefill, for which nothing is drafted.
    return SourceShares(method, sum(len(turn.step_tokens) - 1 for turn in turns), sources)


def replayed_shares(result: ReplayResult) -> SourceShares:
    wins = Counter[int]()
    for turn in result.turns:
        wins += source_wins(turn.sources.tolist(), turn.accept_lengths.tolist())
    sources = {
        str(source): SourceCounts(count.drafted, count.accepted, count.hits, wins[source])
        for source, count in result.by_source().items()
        if count.drafted
    }
    return SourceShares(result.method, result.drafted_steps, sources)


def source_wins(sources: Iterable[int], step_tokens: Iterable[int]) -> Counter[int]:
    """Count the steps in which each source had a token accepted.

    ``sources`` has an entry per token, and ``step_tokens`` the number of tokens per step.
    """
    rest = iter(sources)
    return Counter(chain.from_iterable(set(islice(rest, tokens)) for tokens in step_tokens))
