"""Text before the first stop string, in a whole text or in a stream of pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hdtool.runtime.settings.draft_sources import SourceId

TextPiece = tuple[str, SourceId]


class BeforeStop:
    """The text before the first stop string, added in pieces; holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, or None."""

    def add(self, text: str, *, is_last: bool = False) -> str:
        """Add text, and return what can be shown now; nothing is held back if the text is complete (``is_last``)."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        starts = {start: stop for stop in reversed(self._stops) if (start := text.find(stop)) >= 0}
        complete = len(text) - (0 if is_last else partial_stop_length(text, self._stops))
        end = min((*starts, complete))  # a stop string that begins earlier may yet be completed
        self.found, self._held = starts.get(end), text[end:]
        return text[:end]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string, or all of it if there is none."""
    return BeforeStop(stops).add(text, is_last=True)


def before_stop(pieces: Iterable[TextPiece], stops: Sequence[str]) -> Iterator[TextPiece]:
    """Yield the pieces of a text before the first stop string, then consume the others without yielding them."""
    text, held = BeforeStop(stops), list[TextPiece]()
    for piece in pieces:
        held.append(piece)
        ready, held = _split(held, len(text.add(piece[0])))
        yield from ready
    yield from _split(held, len(text.add("", is_last=True)))[0]


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is also the beginning of a stop string."""
    lengths = (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size]))
    return max(lengths, default=0)


def _split(pieces: Sequence[TextPiece], length: int) -> tuple[list[TextPiece], list[TextPiece]]:
    """Split a list of pieces after ``length`` characters in total, within a piece if necessary."""
    ready: list[TextPiece] = []
    rest: list[TextPiece] = []
    for text, source in pieces:
        if before := text[:length]:
            ready.append((before, source))
        if after := text[length:]:
            rest.append((after, source))
        length = max(0, length - len(text))
    return ready, rest
