"""Progress bars, and numbers formatted for messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
        """Set the text after the bar; it appears at the bar's next update."""
        self._bar.set_postfix_str(text, refresh=False)


def show_bars(enabled: bool) -> None:
    """Show or hide all progress bars of this process."""
    global _hidden
    _hidden = not enabled


@contextmanager
def progress_bar(
    total: int, what: str, *, unit: str = "", quiet: bool = False, is_left: bool = True
) -> Iterator[ProgressBar]:
    """Show a bar labeled ``what`` if standard error is a terminal, bars are not hidden and ``quiet`` is False.

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


def with_progress(items: Sequence[T], what: str, *, is_left: bool = True) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with progress_bar(len(items), what, is_left=is_left) as progress:
        for item in items:
            yield item
            progress.advance()


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
