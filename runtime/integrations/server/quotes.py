"""Files that a chat quotes, in the form in which an answer would repeat them.

Drafters match an answer with its prompt token by token. What a tool returned reads otherwise in the answer: without
the line numbers that editors' tools print, and escaped, inside the JSON of a call. There every line end breaks a match.
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

from hdtool.data.chat import LINE_END, encode_text
from hdtool.runtime.kernels.compiled import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUOTING = ("user", "tool")
"""Roles whose messages quote files."""
NUMBERED = re.compile(r" *L?([0-9]{1,7})(?:→|\t| ?\| ?|: ?)")
"""The number of a line, as tools print it before its text."""
FEWEST_NUMBERED = 3
"""Lines with consecutive numbers that are taken for a listing."""
KEPT_CHARACTERS = 4_000_000


def without_line_numbers(text: str) -> str:
    """A text in which lines that are numbered in order have no numbers."""
    lines = text.split(LINE_END)
    found = [NUMBERED.match(line) for line in lines]
    offsets = [int(number[1]) - place if number else None for place, number in enumerate(found)]
    for offset, places in groupby(range(len(lines)), offsets.__getitem__):
        listing = list(places)
        if offset is not None and len(listing) >= FEWEST_NUMBERED:
            for place in listing:
                number = found[place]
                lines[place] = lines[place][number.end() :] if number else lines[place]
    return LINE_END.join(lines)


def quoted_forms(text: str, *, in_json: bool) -> Iterator[str]:
    """The forms in which an answer would repeat a text of several lines, other than the text itself.

    ``in_json`` adds the one that it has inside a string of JSON.
    """
    if LINE_END not in text:
        return
    bare = without_line_numbers(text)
    if bare != text:
        yield bare
    if in_json:
        yield json.dumps(bare, ensure_ascii=False)[1:-1]


class Quotes:
    """Encodes what chats quote, each message once, as a conversation repeats its messages in every request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most_characters: int = KEPT_CHARACTERS) -> None:
        self._tokenizer, self._most = tokenizer, most_characters
        self._kept: OrderedDict[tuple[str, str, bool], Ints] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def tokens(self, messages: Sequence[Mapping[str, Any]], owner: str, *, in_json: bool) -> Sequence[int]:
        """What the messages quote, in the forms of an answer. What one ``owner`` sent saves no time to another."""
        quoted = [str(message["content"]) for message in messages if message["role"] in QUOTING]
        found = [self._encoded(text, owner, in_json) for text in quoted if LINE_END in text]
        return np.concatenate(found).tolist() if found else ()

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
            while self._characters > self._most:
                (_, oldest, _), _ = self._kept.popitem(last=False)
                self._characters -= len(oldest)
        return encoded
