"""Progress bars of long work, on standard error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_hidden = False


class Bar:
    """A progress bar."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def to(self, place: int) -> None:
        self._shown.update(place - self._shown.n)

    def advance(self) -> None:
        self._shown.update(1)

    def show(self, text: str) -> None:
        """Put a text after the bar, from the next update on."""
        self._shown.set_postfix_str(text, refresh=False)


def show_bars(shown: bool) -> None:
    """Whether bars of this process may be shown: not in a command with --quiet, whatever loads its model."""
    global _hidden
    _hidden = not shown


@contextmanager
def bar(total: int, what: str, *, unit: str = "", quiet: bool = False) -> Iterator[Bar]:
    """A bar that is shown only if standard error is a terminal, and not with ``quiet``."""
    from tqdm import tqdm

    scaled = {"unit": unit, "unit_scale": True, "unit_divisor": 1024} if unit else {"unit": " " + what}
    with tqdm(
        total=total, desc=what, disable=True if quiet or _hidden else None, dynamic_ncols=True, **scaled
    ) as shown:
        yield Bar(shown)


def over(items: Sequence[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar of those that are done."""
    with bar(len(items), what, quiet=quiet) as shown:
        for item in items:
            yield item
            shown.advance()
