"""Count usable and unusable records and files, and say which cannot be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hdtool.data.errors import RecordError
from hdtool.data.progress import count_of

MAX_MESSAGES = 20
MAX_FILES_SHOWN = 5
"""Maximum number of unreadable files that an error names."""
MAX_MODELS_COUNTED = 100
"""Maximum number of distinct model names that are counted."""
TOLERANCE = 0.05
"""Default maximum share of unusable records."""


@dataclass
class Tally:
    """Counts of usable and unusable records, and of files that cannot be read to their end."""

    good: int = 0
    bad: int = 0
    files: int = 0
    bytes: int = 0
    bad_files: int = 0
    bad_bytes: int = 0
    file_messages: list[str] = field(default_factory=list)
    """Reasons, with advice, why the first unreadable files cannot be read."""
    messages: list[str] = field(default_factory=list)
    """Places and reasons of the first unusable records."""
    first_bad: str = ""
    advice: str = ""
    """Additional advice on the first unusable record."""
    models: Counter[str] = field(default_factory=Counter)
    """Number of records by the name of the model that answered."""

    def note(self, where: str, fault: Exception) -> None:
        # Names in a record may contain line breaks.
        reason = " ".join(str(fault).split())[:200]
        self.bad += 1
        if not self.first_bad:
            self.first_bad, self.advice = f"{where} ({reason})", str(getattr(fault, "advice", ""))
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(f"{where}: {reason}")

    def count_file(self, size: int, fault: Exception | None = None) -> None:
        """Count an input file, with the reason if it cannot be read."""
        self.files, self.bytes = self.files + 1, self.bytes + size
        if fault:
            self.bad_files, self.bad_bytes = self.bad_files + 1, self.bad_bytes + size
            if len(self.file_messages) < MAX_MESSAGES:
                self.file_messages.append(" ".join(str(fault).split()))

    def name_model(self, name: str) -> None:
        if name in self.models or len(self.models) < MAX_MODELS_COUNTED:
            self.models[name] += 1

    def refuse(self, where: str, fault: Exception) -> None:
        """Move a record from the count of usable records to the count of unusable ones."""
        self.good -= 1
        self.note(where, fault)

    def add(self, later: Tally) -> None:
        """Add the counts of a later part of the inputs."""
        self.good, self.bad = self.good + later.good, self.bad + later.bad
        self.files, self.bytes = self.files + later.files, self.bytes + later.bytes
        self.bad_files, self.bad_bytes = self.bad_files + later.bad_files, self.bad_bytes + later.bad_bytes
        self.file_messages += later.file_messages[: MAX_MESSAGES - len(self.file_messages)]
        if not self.first_bad:
            self.first_bad, self.advice = later.first_bad, later.advice
        self.messages += later.messages[: MAX_MESSAGES - len(self.messages)]
        self.models += later.models

    def left_out(self) -> list[str]:
        """Return lines for the user: the first unusable files and records, and the numbers of further ones."""
        more_files, more = self.bad_files - len(self.file_messages), self.bad - len(self.messages)
        return [
            *(f"left out: {line}" for line in self.file_messages),
            *([f"left out: {count_of(more_files, 'more file')}"] if more_files else []),
            *(f"left out: {line}" for line in self.messages),
            *([f"left out: {count_of(more, 'more record')}"] if more else []),
        ]

    def check(self, tolerance: float) -> None:
        """Raise RecordError if no file can be read, or if the unusable share of the inputs exceeds ``tolerance``.

        A file that cannot be read counts with its share of all bytes, because its number of records is unknown.
        """
        if self.bad_files and (self.bad_files == self.files or self.bad_bytes > tolerance * self.bytes):
            raise RecordError(self._unread())
        count = self.bad + self.good
        if self.bad > tolerance * count:
            raise RecordError(
                f"{self.bad} of {count_of(count, 'record')} cannot be used, the first at {self.first_bad}: "
                f"correct or remove them, or raise --max-bad-fraction{self.advice}"
            )

    def _unread(self) -> str:
        if self.files == 1:
            return self.file_messages[0]
        shown = [message.rpartition(": ")[0] for message in self.file_messages[:MAX_FILES_SHOWN]]
        more = ["…"] if self.bad_files > len(shown) else []
        share = f"{100 * self.bad_bytes / max(1, self.bytes):.2g}% of the bytes"
        return (
            f"{self.bad_files:,} of {self.files:,} files cannot be read, {share} ({'; '.join(shown + more)}): "
            "correct or remove them, or raise --max-bad-fraction"
        )
