"""Stop strings: an answer ends where its text contains one of them, and the text is cut before it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hdtool.runtime.source_names import SourceName
from hdtool.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, SourceName]


class StopTexts:
    """A container of the tokens that end the answer: those of ``stops``, and any that completes a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], stops: Container[int]) -> None:
        self._stream = TextStream(tokenizer)
        self._texts, self._stops = texts, stops
        self._longest = max(map(len, texts))
        self._tail = ""

    def __contains__(self, token: object) -> bool:
        # The loop tests each token once, in order.
        assert isinstance(token, int)
        if token in self._stops:
            return True
        text = self._tail + self._stream.add([token])
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return first_stop(text, self._texts) is not None


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string in a text begins."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: first_stop(text, stops)]


def before_stop(pieces: Iterable[Piece], stops: Sequence[str]) -> Iterator[Piece]:
    """The pieces of a text up to the first stop string. What may be the beginning of one is held back."""
    if not stops:
        return (piece for piece in pieces if piece[0])
    return _before_stop(pieces, stops)


def _before_stop(pieces: Iterable[Piece], stops: Sequence[str]) -> Iterator[Piece]:
    held: list[Piece] = []
    ended = False
    for piece in pieces:
        if ended:
            continue  # the steps of later pieces are counted to their end
        held.append(piece)
        text = "".join(part for part, _ in held)
        end = first_stop(text, stops)
        ended = end is not None
        ready, held = _split(held, len(text) - begun_length(text, stops) if end is None else end)
        yield from ready
    if not ended:
        yield from held


def begun_length(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of a text that begins a stop string."""
    lengths = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(lengths, default=0)


def _split(pieces: Sequence[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces of the first ``length`` characters, and those of the rest."""
    ready: list[Piece] = []
    rest: list[Piece] = []
    for text, source in pieces:
        if before := text[:length]:
            ready.append((before, source))
        if after := text[length:]:
            rest.append((after, source))
        length = max(0, length - len(text))
    return ready, rest
