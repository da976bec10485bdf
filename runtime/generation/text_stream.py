"""Turns tokens into text: incrementally in a stream, all at once, or one token into its bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from hdtool.runtime.generation.stop_strings import BeforeStop, TextPiece

REPLACEMENT = "\ufffd"
"""The replacement character that a tokenizer returns for an incomplete character."""

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""Matches a token of SentencePiece that stands for one byte."""
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted({*range(256)} - PRINTABLE))
}
"""Byte of each character in byte-level BPE tokens, which represent unprintable bytes by characters from U+0100 on."""


class TextStream:
    """Detokenizes incrementally: returns text once it can no longer change, in pieces that join to the full text.

    The text ends before the first stop string, and text that may begin one is held back.

    The text of a token may depend on the token before it, so new ids are decoded together with the ids of the last
    returned piece, ``_ids[_start:_read]``. Special tokens, which ``text_of`` skips, are dropped on arrival, so that a
    long run of them is not decoded again with each new token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self.shown = tokenizer, BeforeStop(stops)
        self._decode = (
            decoder_of(tokenizer) if skip_special_tokens else partial(text_of, tokenizer, skip_special_tokens=False)
        )
        self._ids: list[int] = []
        self._skipped: dict[int, bool] = {}
        self._start = 0
        self._read = 0

    def add(self, ids: Sequence[int]) -> str:
        """Append ids; return the text that they complete, except incomplete characters and begun stop strings."""
        return self.shown.add(self._complete(ids))

    def _complete(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        fresh = self._unread()
        if not fresh or fresh.endswith(REPLACEMENT):
            self._drop_skipped(len(ids))
            return ""
        self._start, self._read = self._read, len(self._ids)
        return fresh

    def end(self) -> str:
        """Return the rest of the text at the end of the answer, incomplete characters included."""
        return self.shown.add(self._unread(), is_last=True)

    def _drop_skipped(self, newest: int) -> None:
        """Drop special tokens from the last ``newest`` ids; ``_decode`` skips these tokens in any context."""
        first = len(self._ids) - newest
        self._ids[first:] = [id_ for id_ in self._ids[first:] if not self._is_skipped(id_)]

    def _is_skipped(self, id_: int) -> bool:
        """Return True if ``_decode`` skips a token, returning no text for it although ``token_text`` does."""
        if id_ not in self._skipped:
            shown = self._decode([id_])
            self._skipped[id_] = not shown and bool(token_text(self._tokenizer, id_))
        return self._skipped[id_]

    def _unread(self) -> str:
        returned = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(returned) :]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of one token, which may be a special token."""
    return text_of(tokenizer, [token], skip_special_tokens=False)


def bytes_of(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes of a token, which may be only part of a character."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return text.encode()
    piece: Any = tokenizer.convert_ids_to_tokens(token)
    if isinstance(piece, bytes):
        return piece
    if byte := BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if all(character in BYTE_OF for character in piece):
        return bytes(BYTE_OF[character] for character in piece)
    return text.encode()


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function that decodes ids as ``text_of`` does.

    If the tokenizer's classes only delegate to the tokenizers library, the library's faster decoder is returned.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    stock = getattr(type(tokenizer), "decode", None) is PreTrainedTokenizerFast.decode
    if isinstance(backend, Tokenizer) and stock and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        return backend.decode  # special tokens are skipped by default
    return partial(text_of, tokenizer)


def pieces_of(tokenizer: PreTrainedTokenizerBase, drafted: Iterable[tuple[int, SourceId]]) -> Iterator[TextPiece]:
    """Yield the text that each token completes, with the token's source; last, the rest of the text, with ``NONE``."""
    text = TextStream(tokenizer)
    for token, source in drafted:
        yield text.add([token]), source
    yield text.end(), SourceId.NONE
