"""The steps that generate an answer, and statistics over steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.settings.draft_sources import SourceId


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model produced a token that ends the answer."""
    LENGTH = "length"
    """The answer has ``max_new_tokens`` tokens."""
    CONTEXT = "context"
    """The model's context is full."""
    INTERRUPT = "interrupt"
    """The user interrupted the answer."""


class Step(NamedTuple):
    """The tokens that one forward pass of the target emitted, the tree that it verified, and how long the step took."""

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    draft_seconds: float
    verify_seconds: float
    """Seconds inside the model's forward pass."""
    seconds: float
    """Seconds of the whole step; includes work of the consumer if the device computes asynchronously."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that were already in the KV cache; 0 after the first step."""

    @property
    def sources(self) -> list[SourceId]:
        """Source that drafted each emitted token; ``NONE`` for the bonus token."""
        return [*(SourceId(source) for source in self.tree.sources[self.path].tolist()), SourceId.NONE]


MAX_UNCOUNTED_STEPS = 1024


@dataclass
class Stats:
    """Statistics summed over the steps of one or more answers."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finish: Finish | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that were already in the KV cache."""
    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, len(SourceId)), np.int64))
    """``drafted``, ``accepted`` and ``hits``, one row each, ``[3, sources]``."""
    _uncounted: list[tuple[npt.NDArray[np.uint8], list[int]]] = field(default_factory=list)
    """Sources and path of each step that is not in ``_counts`` yet; counted on demand, or once there are many."""
    source_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SourceId)))

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
            if len(self._uncounted) == MAX_UNCOUNTED_STEPS:
                self._count()

    def _count(self) -> npt.NDArray[np.int64]:
        for sources, path in self._uncounted:
            drafted = np.bincount(sources, minlength=len(SourceId))
            self._counts += drafted, np.bincount(sources[path], minlength=len(SourceId)), drafted > 0
        self._uncounted.clear()
        return self._counts

    @property
    def drafted(self) -> npt.NDArray[np.int64]:
        """Number of drafted nodes per source."""
        drafted: npt.NDArray[np.int64] = self._count()[0]
        return drafted

    @property
    def accepted(self) -> npt.NDArray[np.int64]:
        """Number of accepted nodes per source."""
        accepted: npt.NDArray[np.int64] = self._count()[1]
        return accepted

    @property
    def hits(self) -> npt.NDArray[np.int64]:
        """Number of steps in which each source drafted at least one node."""
        hits: npt.NDArray[np.int64] = self._count()[2]
        return hits

    def counted(self, steps: Iterable[Step], drafter: Drafter) -> Iterator[Step]:
        """Yield each step after adding it to the statistics; at the end, add the seconds that each source took."""
        add_seconds = self.timing(drafter)
        try:
            for step in steps:
                self.add(step)
                yield step
        finally:
            add_seconds()

    def timing(self, drafter: Drafter) -> Callable[[], None]:
        """Start timing a drafter's sources; return a function that adds the seconds to ``source_seconds``."""
        before = dict(drafter.seconds)

        def add_seconds() -> None:
            for source, seconds in drafter.seconds.items():
                self.source_seconds[source] += seconds - before.get(source, 0.0)

        return add_seconds

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
    def sources(self) -> list[SourceId]:
        """Sources that drafted at least one node, or in which time was spent."""
        active = (source for source in sorted(SourceId) if self.drafted[source] or self.source_seconds[source])
        return [source for source in active if source]

    @property
    def that_helped(self) -> list[SourceId]:
        """Sources that drafted at least one accepted token."""
        return [source for source in self.sources if self.accepted[source]]

    def sources_json(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each source for the JSON output; the keys are public and must not change."""
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
        """Number of accepted draft tokens from a predicted output, as OpenAI's API counts them."""
        return int(self.accepted[SourceId.PREDICTION])

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of rejected draft tokens from a predicted output; tokens rejected several times count each time."""
        return int(self.drafted[SourceId.PREDICTION]) - self.accepted_prediction_tokens

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
        """Overhead per step in microseconds: the time outside the model's forward pass."""
        return self._per_step(self.seconds - self.verify_seconds) * 1e6

    def source_us_per_step(self, source: SourceId) -> float:
        return self._per_step(float(self.source_seconds[source])) * 1e6

    def _per_step(self, seconds: float) -> float:
        return seconds / self.steps if self.steps else 0.0
