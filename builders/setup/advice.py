"""What to do after a set-up, by what it measured: which sources bring nothing, and what more answers would bring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from hdtool.data.stores.inventory import DIGITS
from hdtool.data.tally import counted

LEAST_GAIN = 1.01
"""Tokens per step with a source over those without it; a smaller gain is nothing."""
FURTHER_GAIN = 1.05
"""Tokens per step over today's, for which the number of further answers is estimated."""
MOST_TIMES = 10
"""The learning curve is not extended beyond so many times the answers that it was measured with."""
LEAST_ANSWERS = 20
"""Answers in a model store, of which half can show what more would bring."""
RERUN = "run setup on all logs with --replace"


def advice(stages: Mapping[str, Mapping[str, Any]], missing: float | None) -> list[str]:
    """Sentences on what to do next; ``missing`` is the factor in tokens per step from which on drafting pays.

    It is None where drafting pays already.
    """
    steps = stages["replay"]["tokens_per_step"]
    return [*_on_answers(stages, missing), *_on_corpus(stages, steps), *_on_history(steps)]


def gains(steps: Mapping[str, float]) -> dict[str, float]:
    """What each source multiplies the tokens per step of those before it by."""
    names = list(steps)
    return {name: steps[name] / steps[before] for before, name in pairwise(names)}


def _on_answers(stages: Mapping[str, Mapping[str, Any]], missing: float | None) -> Iterator[str]:
    curve = stages["replay"].get("learning_curve", [])
    if not curve:
        yield (
            f"log or collect {LEAST_ANSWERS} answers or more, and {RERUN}: with fewer, setup cannot measure what more "
            "of them would bring"
        )
        return
    half, whole = curve
    measured = (
        f"{half['tokens_per_step']:.2f} tokens per step from {half['answers']:,} answers, "
        f"{whole['tokens_per_step']:.2f} from {whole['answers']:,}"
    )
    more = _answers_for(FURTHER_GAIN if missing is None else missing, half, whole)
    if more is None:
        yield f"more answers would bring little: the model store gives {measured}"
    elif missing is None:
        yield (
            f"log or collect about {counted(more, 'more answer')} for another {FURTHER_GAIN - 1:.0%} tokens per step, "
            f"and {RERUN}: the model store gives {measured}"
        )
    else:
        yield (
            f"log or collect about {counted(more, 'more answer')} to make drafting pay, and {RERUN}: that takes "
            f"{missing - 1:.0%} more tokens per step, and the model store gives {measured}"
        )


def _answers_for(factor: float, half: Mapping[str, float], whole: Mapping[str, float]) -> int | None:
    """How many more answers multiply the tokens per step by a factor, if each doubling of them brings the same.

    None if they would be too many for that to be likely.
    """
    doublings = math.log2(whole["answers"] / half["answers"])
    growth = whole["tokens_per_step"] / half["tokens_per_step"]
    if doublings <= 0 or growth <= 1:
        return None
    needed = math.log(factor) / math.log(growth) * doublings
    if needed > math.log2(MOST_TIMES):
        return None
    more = whole["answers"] * (2**needed - 1)
    unit: int = 10 ** max(0, math.floor(math.log10(max(1.0, more))) - 1)
    return math.ceil(more / unit) * unit


def _on_corpus(stages: Mapping[str, Mapping[str, Any]], steps: Mapping[str, float]) -> Iterator[str]:
    gain = gains(steps).get("corpus")
    if gain is None or gain >= LEAST_GAIN:
        return
    without = steps["corpus"] / gain
    if built := stages.get("corpus_index"):
        name = f"corpus-{Path(built['folder']).parent.name[:DIGITS]}"
        remedy = f"leave --corpus out and remove its index with hdtool stores remove {name}"
    else:
        remedy = "draft with --corpus-db none"
    yield (
        f"the corpus brought nothing ({without:.2f} tokens per step without it, {steps['corpus']:.2f} with it): "
        f"{remedy}, or name texts that answers quote"
    )


def _on_history(steps: Mapping[str, float]) -> Iterator[str]:
    gain = gains(steps).get("history")
    if gain is not None and gain >= LEAST_GAIN:
        yield (
            f"the history brought {gain - 1:.0%} more tokens per step: answer in one process, such as hdtool serve, or "
            "keep it on disk with --history home"
        )
