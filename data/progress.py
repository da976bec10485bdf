"""Show progress bars, and count usable and unusable records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hdtool.data.errors import RecordError

T = TypeVar("T")
BAR_FORMAT = (
    "{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{n_fmt}}/{{total_fmt}}{noun} "
    "[{{elapsed}}<{{remaining}}, {{rate_noinv_fmt}}{{postfix}}]"
)
"""Format of tqdm's bar. The rate is always per second, even below one."""
_hidden = False


class ProgressBar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def to(self, position: int) -> None:
        self._bar.update(position - self._bar.n)

    def advance(self) -> None:
        self._bar.update(1)

    def show(self, text: str) -> None:
        """Set the text after the bar. It appears at the bar's next update."""
        self._bar.set_postfix_str(text, refresh=False)


def show_bars(enabled: bool) -> None:
    """Show or hide all progress bars of this process."""
    global _hidden
    _hidden = not enabled


@contextmanager
def progress_bar(
    total: int, what: str, *, unit: str = "", quiet: bool = False, is_left: bool = True
) -> Iterator[ProgressBar]:
    """Show a bar if standard error is a terminal and ``quiet`` is False.

    ``unit`` is the plural of what is counted, or "B" for bytes. Without a unit, ``what`` names what is counted. The bar
    disappears at the end if ``is_left`` is False.
    """
    from tqdm import tqdm

    is_size = unit == "B"
    scaled = {"unit_scale": True, "unit_divisor": 1024} if is_size else {}
    noun = "" if is_size or not unit else f" {unit.removesuffix('s') if total == 1 else unit}"
    with tqdm(
        total=total,
        desc=what,
        disable=True if quiet or _hidden else None,
        leave=is_left,
        dynamic_ncols=True,
        bar_format=BAR_FORMAT.format(noun=noun),
        unit=unit if is_size else f" {unit or what}",
        **scaled,
    ) as tqdm_bar:
        yield ProgressBar(tqdm_bar)


@contextmanager
def deferred_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``show(position, total)``. Its first call opens the bar, once the total is known."""
    with ExitStack() as opened:
        bars: list[ProgressBar] = []

        def show(position: int, total: int) -> None:
            if not bars:
                bars.append(opened.enter_context(progress_bar(total, what, quiet=quiet)))
            bars[0].to(position)

        yield show


def with_progress(items: Sequence[T], what: str, *, quiet: bool = False, is_left: bool = True) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with progress_bar(len(items), what, quiet=quiet, is_left=is_left) as progress:
        for item in items:
            yield item
            progress.advance()


MAX_MESSAGES = 20
MAX_FILES_SHOWN = 5
"""Maximum number of unreadable files that an error names."""
MAX_MODELS_COUNTED = 100
"""Maximum number of distinct model names that are counted."""
TOLERANCE = 0.05
"""Default maximum share of unusable records."""


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def abbreviated(number: int) -> str:
    """Abbreviate a number to at most three digits and an SI prefix, as in 1.2M."""
    value, prefix = float(number), ""
    for larger in "kMGT":
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{value:.0f}{prefix}" if value >= 9.95 or not prefix else f"{value:.1f}{prefix}"


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
    """Reasons, with advice, why the first of these files cannot be read."""
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
        """Raise RecordError if too much of the inputs is unusable.

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
