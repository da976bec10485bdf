"""Progress bars that count, whether or not there is a terminal to show them."""

from __future__ import annotations

from typing import Any

import pytest

from hdtool.data import progress


class CountedBar(progress.ProgressBar):
    def __init__(self, bar: Any) -> None:
        super().__init__(bar)
        self.total, self.position = bar.total, 0

    def to(self, position: int) -> None:
        self.position = position

    def advance(self) -> None:
        self.position += 1


def counted_bars(monkeypatch: pytest.MonkeyPatch) -> list[CountedBar]:
    """Return a list to which every bar that is opened from now on is added."""
    bars: list[CountedBar] = []

    def opened(bar: Any) -> CountedBar:
        bars.append(CountedBar(bar))
        return bars[-1]

    monkeypatch.setattr(progress, "ProgressBar", opened)
    return bars
