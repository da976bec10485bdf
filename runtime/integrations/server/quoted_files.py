"""Files quoted in a conversation, whose text answers may repeat.

Drafters match an answer with its prompt token by token. When an answer quotes a tool result, the quote differs from the
result: it has no line numbers, and inside the JSON of a call it is escaped, so every line end breaks a match.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from hdtool.data.chat import (
    LINE_END,
    encode_text,
)
from hdtool.runtime.kernels.compiled import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


QUOTING_ROLES = ("user", "tool")
"""Roles whose messages may contain text for the answer to quote."""
NUMBERED_LINE = re.compile(r" *L?([0-9]{1,7})(?:→|\t| ?\| ?|: ?)")
"""Matches a line number as tools print it before the text of a line."""
MIN_NUMBERED_LINES = 3
"""Minimum number of consecutively numbered lines that count as a listing."""
MAX_KEPT_CHARACTERS = 4_000_000


def without_line_numbers(text: str) -> str:
    """Remove line numbers from runs of at least ``MIN_NUMBERED_LINES`` lines that are numbered consecutively."""
    lines = text.split(LINE_END)
    numbers = [NUMBERED_LINE.match(line) for line in lines]
    offsets = [int(number[1]) - line_index if number else None for line_index, number in enumerate(numbers)]
    for offset, line_indices in groupby(range(len(lines)), offsets.__getitem__):
        listing = list(line_indices)
        if offset is not None and len(listing) >= MIN_NUMBERED_LINES:
            for line_index in listing:
                number = numbers[line_index]
                lines[line_index] = lines[line_index][number.end() :] if number else lines[line_index]
    return LINE_END.join(lines)


def quoted_forms(text: str, *, in_json: bool) -> Iterator[str]:
    """Yield the forms, besides the text itself, in which an answer may quote a multi-line text.

    These are the text without its line numbers, if it has any, and with ``in_json``, that text escaped as in a JSON
    string.
    """
    if LINE_END not in text:
        return
    bare = without_line_numbers(text)
    if bare != text:
        yield bare
    if in_json:
        yield json.dumps(bare, ensure_ascii=False)[1:-1]


class Quotes:
    """Encodes text that answers may quote; caches the tokens, because each request repeats the conversation so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_characters: int = MAX_KEPT_CHARACTERS) -> None:
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._kept: OrderedDict[tuple[str, str, bool], Ints] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def tokens(self, messages: Sequence[Mapping[str, Any]], owner: str, *, in_json: bool) -> Sequence[int]:
        """Return the tokens of all ``quoted_forms`` of the user and tool messages.

        The cache is separate for each ``owner``, so that response times reveal nothing about other owners' messages.
        """
        quoted = [str(message["content"]) for message in messages if message["role"] in QUOTING_ROLES]
        encoded = [self._encoded(text, owner, in_json) for text in quoted if LINE_END in text]
        return np.concatenate(encoded).tolist() if encoded else ()

    def _encoded(self, text: str, owner: str, in_json: bool) -> Ints:
        key = owner, text, in_json
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        ids = [
            token
            for form in quoted_forms(text, in_json=in_json)
            for token in encode_text(self._tokenizer, LINE_END + form, special=False)
        ]
        encoded = np.array(ids, np.int32)
        with self._lock:
            self._characters += len(text) if key not in self._kept else 0
            self._kept[key] = encoded
            while self._characters > self._max_characters:
                (_, oldest, _), _ = self._kept.popitem(last=False)
                self._characters -= len(oldest)
        return encoded
