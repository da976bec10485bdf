"""What the sweep found out about one type."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

TREES, CHAINS, REFUSED, WRONG = "exact", "chains only", "refused", "WRONG"
NOT_BUILT, FAILS, OTHER = "cannot be built", "the library fails", "no decoder"
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
    """The pass that a simulated CUDA device captured."""
    compiled: bool = False
    notes: list[str] = field(default_factory=list)
    """What the library itself does."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for the terminal."""
        failed = "; ".join(f"{name}: {found}" for name, found in self.checks.items() if found != SAME)
        about = [self.reason, failed, "compiled" if self.compiled else "", self.captured, *self.notes]
        return f"{self.kind:26} {self.verdict:12} {self.seconds:5.1f} s  {' | '.join(filter(None, about))}"
