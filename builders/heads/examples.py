"""Lessons: texts as drafting heads learn from them, each with the tokens that are worth drafting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdtool.data.chat import encode_text
from hdtool.data.errors import RecordError
from hdtool.data.progress import Bar
from hdtool.data.prompts import Message
from hdtool.data.records import Part, Reading, Record
from hdtool.data.traces import Recorded, Trace
from hdtool.runtime.evaluation.recorded_turns import TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_TOKENS = 4
"""The first head speaks of a token that two others stand before."""


@dataclass(frozen=True)
class Example:
    """A text within the window."""

    ids: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.bool_]
    """Which of its tokens the model says; of a plain text, all."""


def lessons(
    reading: Reading, tokenizer: PreTrainedTokenizerBase, turns: TurnReader, window: int, shown: Bar
) -> list[Example]:
    """All lessons of some inputs; an error if there is nothing long enough to learn from."""
    found: list[Example] = []
    longest = 0
    for record in reading:
        for whole in _lessons_of(record, tokenizer, turns):
            longest = max(longest, len(whole.ids))
            found += _cut(whole, window)
        shown.to(reading.bytes_read)
    if not found:
        raise RecordError(
            f"nothing to learn from: the longest text has {longest} tokens, and heads need {FEWEST_TOKENS} at least "
            f"and an answer of the model's among them; name more text"
        )
    return found


def _lessons_of(record: Record, tokenizer: PreTrainedTokenizerBase, turns: TurnReader) -> Iterator[Example]:
    if all(part.by_model for part in record.parts):
        for part in record.parts:
            ids = part.ids or encode_text(tokenizer, part.text, special=True)
            yield Example(np.array(ids, np.int64), np.ones(len(ids), np.bool_))
        return
    messages = tuple(_message(part) for part in record.parts)
    answers = [
        Recorded(place, part.ids, len(part.ids) if part.ids else None)
        for place, part in enumerate(record.parts)
        if part.by_model and place
    ]
    try:
        yield from _of_conversation(Trace("", "", messages, tuple(answers), "a conversation"), turns)
    except RecordError:
        if any(part.ids for part in record.parts):
            raise
        # Templates refuse what does not go to and fro; the texts are still worth reading.
        for part in record.parts:
            ids = encode_text(tokenizer, part.text, special=True)
            yield Example(np.array(ids, np.int64), np.full(len(ids), part.by_model))


def _message(part: Part) -> Message:
    return {"role": "assistant" if part.by_model else part.role, "content": part.text}


def _of_conversation(trace: Trace, turns: TurnReader) -> Iterator[Example]:
    """One lesson for answers whose contexts begin with each other, so that no text is read twice."""
    ids: list[int] = []
    drafted: list[bool] = []
    for turn in turns.turns(trace):
        if turn.prompt[: len(ids)] != ids:
            yield Example(np.array(ids, np.int64), np.array(drafted, np.bool_))
            ids, drafted = [], []
        drafted += [False] * (len(turn.prompt) - len(ids)) + [True] * len(turn.answer)
        ids = turn.prompt + turn.answer
    if ids:
        yield Example(np.array(ids, np.int64), np.array(drafted, np.bool_))


def _cut(lesson: Example, window: int) -> Iterator[Example]:
    for start in range(0, len(lesson.ids), window):
        ids, drafted = lesson.ids[start : start + window], lesson.drafted[start : start + window]
        if len(ids) >= FEWEST_TOKENS and drafted[2:].any():
            yield Example(ids, drafted)
