"""A case: one answer, piece by piece, each with the source that it was accepted from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdtool.runtime.evaluation.replay_results import Played, PlayedTurn
from hdtool.runtime.evaluation.report.tables import Case
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_WHOLE = range(60, 301)
"""Tokens of an answer that is neither a word nor a screenful."""


def case_of(method: str, played: Played, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> Case:
    """The answer whose tokens per step are nearest to those of all; there is a question for each turn."""
    every = list(zip(played.turns, questions, strict=True))
    fit = [one for one in every if len(one[0].tokens) in SHOWN_WHOLE] or every
    typical, question = min(fit, key=lambda one: abs(_tokens_per_step(one[0]) - played.tokens_per_step))
    return Case(
        method=method,
        question=question,
        pieces=pieces(tokenizer, typical.tokens.tolist(), typical.sources.tolist()),
        tokens=len(typical.tokens),
        steps=len(typical.accept_lengths),
    )


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], sources: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """The text that each token completes, and who drafted that."""
    text = TextStream(tokenizer)
    told = [(text.add([token]), str(SourceName(source))) for token, source in zip(tokens, sources, strict=True)]
    return tuple(piece for piece in (*told, (text.end(), str(SourceName.NONE))) if piece[0])


def _tokens_per_step(turn: PlayedTurn) -> float:
    return len(turn.tokens) / len(turn.accept_lengths)
