"""Progress bars: what they count, in words, at any speed."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO

from hdtool.data.progress import progress_bar, show_bars


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def last(self) -> str:
        return self.getvalue().split("\r")[-1].strip()


def test_a_bar_names_what_it_counts() -> None:
    show_bars(True)  # a command of an earlier test may have hidden them
    with redirect_stderr(Terminal()) as terminal:
        with progress_bar(4, "corpus index", unit="texts") as shown:
            shown.to(4)
        assert "| 4/4 texts [" in terminal.last and terminal.last.endswith(" texts/s]")
        with progress_bar(1, "sorting", unit="shards") as shown:
            shown.advance()
        assert "| 1/1 shard [" in terminal.last
        with progress_bar(3, "answers") as shown:
            shown.advance()
        assert "| 1/3 [" in terminal.last and terminal.last.endswith(" answers/s]")
        with progress_bar(2048, "reading", unit="B") as shown:
            shown.to(2048)
        assert "| 2.00k/2.00k [" in terminal.last and terminal.last.endswith("B/s]")
