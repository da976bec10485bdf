"""The case of a report: one answer in pieces, each with the source that it was accepted from."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hdtool.runtime.evaluation.replay_results import ReplayResult
from hdtool.runtime.evaluation.report.tables import Case
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.text_stream import TextStream

LENGTHS = range(60, 301)
"""Tokens of an answer that is worth showing and fits a screen."""


def case_of(method: str, result: ReplayResult, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> Case:
    """The answer whose tokens per step are nearest to the average; ``questions`` has one entry per turn."""
    every = list(zip(result.turns, questions, strict=True))
    fit = [one for one in every if len(one[0].tokens) in LENGTHS] or every
    typical, question = min(fit, key=lambda one: abs(one[0].tokens_per_step - result.tokens_per_step))
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
    """The text that each token completes, and the source that drafted the token."""
    text = TextStream(tokenizer)
    parts = [(text.add([token]), str(SourceName(source))) for token, source in zip(tokens, sources, strict=True)]
    return tuple(piece for piece in (*parts, (text.end(), str(SourceName.NONE))) if piece[0])
