"""Result of the sweep for one type."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

TREES, CHAINS, REFUSED, WRONG = "exact", "chains only", "refused", "WRONG"
NOT_BUILT, FAILS, OTHER = "cannot be built", "needs more", "no decoder"
"""Verdicts without a check. ``FAILS`` means that transformers itself cannot answer a prompt of text only."""
VERDICTS = TREES, CHAINS, REFUSED, WRONG, FAILS, NOT_BUILT, OTHER
SAME = "same"


@dataclass
class Result:
    """Verdict about a type, its reason, and the outcome of each check by name."""

    kind: str
    verdict: str = ""
    reason: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    """``SAME``, or a description of the difference or error."""
    captured: str = ""
    """"hdtool" or "transformers", whose pass a simulated CUDA device captured; empty if neither."""
    lookup: str = ""
    """``SAME``, or how prompt lookup of transformers deviates."""
    compiled: bool = False
    notes: list[str] = field(default_factory=list)
    """Observations about transformers itself."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """Return the result as one line for the terminal."""
        failed = "; ".join(f"{name}: {found}" for name, found in self.checks.items() if found != SAME)
        passes = [*(["compiled"] if self.compiled else []), *([f"captured: {self.captured}"] if self.captured else [])]
        lookup = f"prompt lookup: {self.lookup}" if self.lookup not in ("", SAME) else ""
        about = [self.reason, failed, *passes, lookup, *self.notes]
        return f"{self.kind:26} {self.verdict:12} {self.seconds:5.1f} s  {' | '.join(filter(None, about))}"
