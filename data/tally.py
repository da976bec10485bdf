"""Records that could be used and records that could not, counted and named."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hdtool.data.errors import RecordError

BAD_SHOWN = 20
MODELS_COUNTED = 100
"""Names of models; more of them are no names."""
TOLERANCE = 0.05
"""The share of records that may be unusable, where no option sets it."""


def counted(number: int, noun: str) -> str:
    """One of a thing, or several."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@dataclass
class Tally:
    """The counts of usable and unusable records of one or more inputs."""

    good: int = 0
    bad: int = 0
    shown: list[str] = field(default_factory=list)
    """The first unusable records: place and reason."""
    first_bad: str = ""
    advice: str = ""
    """What else helps with the first unusable record."""
    models: Counter[str] = field(default_factory=Counter)
    """How many records name each model as the one that answered."""

    def note(self, place: str, fault: Exception) -> None:
        # Names from the record itself may hold line breaks.
        reason = " ".join(str(fault).split())[:200]
        self.bad += 1
        if not self.first_bad:
            self.first_bad, self.advice = f"{place} ({reason})", str(getattr(fault, "advice", ""))
        if len(self.shown) < BAD_SHOWN:
            self.shown.append(f"{place}: {reason}")

    def name_model(self, name: str) -> None:
        if name in self.models or len(self.models) < MODELS_COUNTED:
            self.models[name] += 1

    def refuse(self, place: str, fault: Exception) -> None:
        """Note a record that was counted as usable before."""
        self.good -= 1
        self.note(place, fault)

    def add(self, later: Tally) -> None:
        """Add the counts of a later part of the inputs."""
        self.good += later.good
        self.bad += later.bad
        if not self.first_bad:
            self.first_bad, self.advice = later.first_bad, later.advice
        self.shown += later.shown[: BAD_SHOWN - len(self.shown)]
        self.models += later.models

    def left_out(self) -> list[str]:
        """Lines for the user: the first unusable records, and the number of the others."""
        more = self.bad - len(self.shown)
        return [f"left out: {line}" for line in self.shown] + (
            [f"left out: {counted(more, 'more record')}"] if more else []
        )

    def check(self, tolerance: float) -> None:
        count = self.bad + self.good
        if self.bad > tolerance * count:
            raise RecordError(
                f"{self.bad} of {counted(count, 'record')} cannot be used, the first at {self.first_bad}: "
                f"correct or remove them, or raise --max-bad-fraction{self.advice}"
            )
