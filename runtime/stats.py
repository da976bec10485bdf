"""What a generation took, summed over its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hdtool.runtime.decode import Finish, Step


@dataclass
class Stats:
    """Sums over the steps of one generation, or of many."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finish: Finish | None = None

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        self.steps += 1
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.finish = step.finish

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        whole = cls()
        for part in parts:
            whole.tokens += part.tokens
            whole.steps += part.steps
            whole.seconds += part.seconds
            whole.draft_seconds += part.draft_seconds
            whole.verify_seconds += part.verify_seconds
        return whole

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
        """Everything that is not the model's own forward pass."""
        return self._per_step(self.seconds - self.verify_seconds) * 1e6

    def _per_step(self, seconds: float) -> float:
        return seconds / self.steps if self.steps else 0.0
