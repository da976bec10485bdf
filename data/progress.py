"""Progress of long work, on standard error: how far, how fast, how long still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Bar:
    """A progress bar that is told where the work stands."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def to(self, place: int) -> None:
        self._shown.update(place - self._shown.n)

    def advance(self) -> None:
        self._shown.update(1)

    def tell(self, words: str) -> None:
        """Behind the bar, from its next move on."""
        self._shown.set_postfix_str(words, refresh=False)


@contextmanager
def bar(total: int, what: str, *, unit: str = "", quiet: bool = False) -> Iterator[Bar]:
    """Shown only where somebody looks: not with ``quiet``, and not when standard error is a file."""
    from tqdm import tqdm

    scaled = {"unit": unit, "unit_scale": True, "unit_divisor": 1024} if unit else {"unit": " " + what}
    with tqdm(total=total, desc=what, disable=True if quiet else None, dynamic_ncols=True, **scaled) as shown:
        yield Bar(shown)
