"""What the sweep found out about one type."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

TREES, CHAINS, REFUSED, WRONG = "exact", "chains only", "refused", "WRONG"
NOT_BUILT, FAILS, OTHER = "cannot be built", "needs more", "no decoder"
"""``FAILS``: the library itself answers no prompt of text alone."""
VERDICTS = TREES, CHAINS, REFUSED, WRONG, FAILS, NOT_BUILT, OTHER
SAME = "same"


@dataclass
class Result:
    """The verdict about a type, its reason, and each check by name."""

    kind: str
    verdict: str = ""
    reason: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    """``SAME``, or what was found instead."""
    captured: str = ""
    """Whose pass a simulated CUDA device captured; empty if none."""
    lookup: str = ""
    """``SAME``, or what prompt lookup of the library does instead."""
    compiled: bool = False
    notes: list[str] = field(default_factory=list)
    """What the library itself does."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for the terminal."""
        failed = "; ".join(f"{name}: {found}" for name, found in self.checks.items() if found != SAME)
        passes = [*(["compiled"] if self.compiled else []), *([f"captured: {self.captured}"] if self.captured else [])]
        lookup = f"prompt lookup: {self.lookup}" if self.lookup not in ("", SAME) else ""
        about = [self.reason, failed, *passes, lookup, *self.notes]
        return f"{self.kind:26} {self.verdict:12} {self.seconds:5.1f} s  {' | '.join(filter(None, about))}"
