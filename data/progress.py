"""Progress bars of long work, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
SHOWN = (
    "{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{n_fmt}}/{{total_fmt}}{noun} "
    "[{{elapsed}}<{{remaining}}, {{rate_noinv_fmt}}{{postfix}}]"
)
"""How tqdm shows a bar: the rate is per second, also below one."""
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
    """A bar that is shown only if standard error is a terminal, and not with ``quiet``.

    ``unit`` is the plural of what is counted, or "B" for bytes; without one, ``what`` is counted.
    """
    from tqdm import tqdm

    is_size = unit == "B"
    scaled = {"unit_scale": True, "unit_divisor": 1024} if is_size else {}
    noun = "" if is_size or not unit else f" {unit.removesuffix('s') if total == 1 else unit}"
    with tqdm(
        total=total,
        desc=what,
        disable=True if quiet or _hidden else None,
        dynamic_ncols=True,
        bar_format=SHOWN.format(noun=noun),
        unit=unit if is_size else f" {unit or what}",
        **scaled,
    ) as shown:
        yield Bar(shown)


@contextmanager
def late_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A function of a place and a total, which shows a bar from its first call on: the total is not known before."""
    with ExitStack() as opened:
        bars: list[Bar] = []

        def show(place: int, total: int) -> None:
            if not bars:
                bars.append(opened.enter_context(bar(total, what, quiet=quiet)))
            bars[0].to(place)

        yield show


def over(items: Sequence[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar of those that are done."""
    with bar(len(items), what, quiet=quiet) as shown:
        for item in items:
            yield item
            shown.advance()
