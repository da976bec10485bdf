"""The answer that a report shows as a typical case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.experiment import shown_pieces
from hdtool.runtime.kernels.compiled import Ints

CASE_LENGTHS = range(60, 301)
"""Lengths, in tokens, of answers that are worth showing and fit a screen."""


@dataclass(frozen=True)
class DraftedAnswer:
    """Answer to a question, with the source of each token."""

    question: str
    tokens: Sequence[int] | Ints
    sources: Sequence[int] | Ints
    """Per token: the ``SourceId`` that drafted it; NONE for a bonus token."""
    steps: int

    @property
    def tokens_per_step(self) -> float:
        return len(self.tokens) / self.steps


@dataclass(frozen=True)
class TypicalCase:
    """One answer in pieces, each with the source that drafted it."""

    method: str
    question: str
    pieces: tuple[tuple[str, str], ...]
    """Text and source name of each piece; the source of bonus tokens is ``none``."""
    tokens: int
    steps: int

    @property
    def sources(self) -> set[str]:
        return {source for _, source in self.pieces}


def typical_case(
    method: str, answers: Iterable[DraftedAnswer], tokenizer: PreTrainedTokenizerBase
) -> TypicalCase | None:
    """Return the answer whose tokens per step are closest to those of all answers; None without answers.

    Only answers with a length in ``CASE_LENGTHS`` are considered, if there are any.
    """
    every = list(answers)
    if not every:
        return None
    overall = sum(len(answer.tokens) for answer in every) / sum(answer.steps for answer in every)
    fitting = [answer for answer in every if len(answer.tokens) in CASE_LENGTHS] or every
    typical = min(fitting, key=lambda answer: abs(answer.tokens_per_step - overall))
    tokens, sources = (np.asarray(ids).tolist() for ids in (typical.tokens, typical.sources))
    pieces = shown_pieces(tokenizer, tokens, sources)
    named = tuple((text, str(source)) for text, source in pieces)
    return TypicalCase(method, typical.question, named, len(typical.tokens), typical.steps)
