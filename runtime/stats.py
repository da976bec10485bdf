"""Statistics of answers, summed over their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hdtool.runtime.drafter import Drafter
from hdtool.runtime.sequence import Finish, Step
from hdtool.runtime.source_names import SourceName

MOST_UNCOUNTED = 1024


@dataclass
class Stats:
    """Sums over the steps of one generation, or of many."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finish: Finish | None = None
    cached_tokens: int = 0
    """Tokens of the prompts that were in the KV cache."""
    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, len(SourceName)), np.int64))
    """The rows of ``drafted``, ``accepted`` and ``hits``."""
    _uncounted: list[tuple[npt.NDArray[np.uint8], list[int]]] = field(default_factory=list)
    """The sources and the path of each of the last steps: they are counted when somebody asks, or there are many."""
    source_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SourceName)))

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        self.steps += 1
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.finish = step.finish
        self.cached_tokens += step.cached_tokens
        if len(step.tree):
            self._uncounted.append((step.tree.sources, step.path))
            if len(self._uncounted) == MOST_UNCOUNTED:
                self._count()

    def _count(self) -> npt.NDArray[np.int64]:
        for sources, path in self._uncounted:
            drafted = np.bincount(sources, minlength=len(SourceName))
            self._counts += drafted, np.bincount(sources[path], minlength=len(SourceName)), drafted > 0
        self._uncounted.clear()
        return self._counts

    @property
    def drafted(self) -> npt.NDArray[np.int64]:
        """Draft nodes of each source."""
        drafted: npt.NDArray[np.int64] = self._count()[0]
        return drafted

    @property
    def accepted(self) -> npt.NDArray[np.int64]:
        """Accepted nodes of each source."""
        accepted: npt.NDArray[np.int64] = self._count()[1]
        return accepted

    @property
    def hits(self) -> npt.NDArray[np.int64]:
        """Steps in which a source drafted at least one node."""
        hits: npt.NDArray[np.int64] = self._count()[2]
        return hits

    def counted(self, steps: Iterable[Step], drafter: Drafter) -> Iterator[Step]:
        """Yield the steps and add each to the sums; at the end, add the seconds of each source."""
        before = dict(drafter.seconds)
        try:
            for step in steps:
                self.add(step)
                yield step
        finally:
            self.add_seconds(before, drafter.seconds)

    def add_seconds(self, before: Mapping[SourceName, float], after: Mapping[SourceName, float]) -> None:
        """Add the seconds of each source between two readings of ``Drafter.seconds``."""
        for source, seconds in after.items():
            self.source_seconds[source] += seconds - before.get(source, 0.0)

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        whole = cls()
        for part in parts:
            whole.tokens += part.tokens
            whole.steps += part.steps
            whole.seconds += part.seconds
            whole.draft_seconds += part.draft_seconds
            whole.verify_seconds += part.verify_seconds
            whole.cached_tokens += part.cached_tokens
            whole._counts += part._count()
            whole.source_seconds += part.source_seconds
        return whole

    @property
    def sources(self) -> list[SourceName]:
        """The sources that drafted a node or took time."""
        found = (source for source in SourceName if self.drafted[source] or self.source_seconds[source])
        return [source for source in found if source]

    @property
    def that_drafted(self) -> list[SourceName]:
        """The sources that drafted a node."""
        return [source for source in self.sources if self.drafted[source]]

    def sources_json(self) -> dict[str, dict[str, float]]:
        """The figures of each source under the names of the JSON output, which must not change."""
        return {
            str(source): {
                "drafted": int(self.drafted[source]),
                "accepted": int(self.accepted[source]),
                "hits": int(self.hits[source]),
                "microseconds": round(float(self.source_seconds[source]) * 1e6, 1),
            }
            for source in self.sources
        }

    @property
    def accepted_prediction_tokens(self) -> int:
        """Accepted draft tokens of a predicted output, as OpenAI's API counts them."""
        return int(self.accepted[SourceName.PREDICTION])

    @property
    def rejected_prediction_tokens(self) -> int:
        """Draft tokens of a predicted output that were not accepted; a token counts in each step that drafts it."""
        return int(self.drafted[SourceName.PREDICTION]) - self.accepted_prediction_tokens

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def draft_us_per_step(self) -> float:
        return self._per_step(self.draft_seconds) * 1e6

    @property
    def verify_ms_per_step(self) -> float:
        return self._per_step(self.verify_seconds) * 1e3

    @property
    def outside_us_per_step(self) -> float:
        """Microseconds of a step outside the model's forward pass."""
        return self._per_step(self.seconds - self.verify_seconds) * 1e6

    def source_us_per_step(self, source: SourceName) -> float:
        return self._per_step(float(self.source_seconds[source])) * 1e6

    def _per_step(self, seconds: float) -> float:
        return seconds / self.steps if self.steps else 0.0
