"""Advice of a set-up: the gains from more answers, from the corpus and from the history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from hdtool.data.progress import count_of
from hdtool.data.stores.stores_at_home import SHOWN_FINGERPRINT_DIGITS

MIN_GAIN = 1.01
"""Minimum ratio of tokens per step with a source to tokens per step without it for the source to count as useful."""
TARGET_GAIN = 1.05
"""Increase in tokens per step, as a ratio, for which the number of further answers is estimated."""
MAX_EXTRAPOLATION = 10
"""Maximum ratio of extrapolated to measured answers in the learning curve."""
MIN_STORE_ANSWERS = 20
"""Minimum number of answers in a model store for measuring a learning curve."""
RERUN_ADVICE = "run setup on all logs with --replace"


def advice(stages: Mapping[str, Mapping[str, Any]], missing: float | None) -> list[str]:
    """Return sentences on what to do next.

    ``missing`` is the ratio by which tokens per step must grow for drafting to pay; None if it pays already.
    """
    steps = stages["replay"]["tokens_per_step"]
    return [*_on_answers(stages, missing), *_on_corpus(stages, steps), *_on_history(steps)]


def source_gains(steps: Mapping[str, float]) -> dict[str, float]:
    """Return the factor by which each source raises tokens per step over the sources before it."""
    names = list(steps)
    return {name: steps[name] / steps[before] for before, name in pairwise(names)}


def _on_answers(stages: Mapping[str, Mapping[str, Any]], missing: float | None) -> Iterator[str]:
    curve = stages["replay"].get("learning_curve", [])
    if not curve:
        yield (
            f"log or collect {MIN_STORE_ANSWERS} answers or more, and {RERUN_ADVICE}: with fewer, setup cannot measure "
            "what more of them would bring"
        )
        return
    half, whole = curve
    measured = (
        f"{half['tokens_per_step']:.2f} tokens per step from {half['answers']:,} answers, "
        f"{whole['tokens_per_step']:.2f} from {whole['answers']:,}"
    )
    more = _answers_for(TARGET_GAIN if missing is None else missing, half, whole)
    if more is None:
        yield f"more answers would bring little: the model store gives {measured}"
    elif missing is None:
        yield (
            f"log or collect about {count_of(more, 'more answer')} for another {TARGET_GAIN - 1:.0%} tokens per step, "
            f"and {RERUN_ADVICE}: the model store gives {measured}"
        )
    else:
        yield (
            f"log or collect about {count_of(more, 'more answer')} to make drafting pay, and {RERUN_ADVICE}: that "
            f"takes {missing - 1:.0%} more tokens per step, and the model store gives {measured}"
        )


def _answers_for(factor: float, half: Mapping[str, float], whole: Mapping[str, float]) -> int | None:
    """Estimate how many more answers in the store raise tokens per step by ``factor``, if each doubling helps equally.

    Return None if the measured gain is not positive, or if the estimate would extrapolate too far.
    """
    doublings = math.log2(whole["answers"] / half["answers"])
    growth = whole["tokens_per_step"] / half["tokens_per_step"]
    if doublings <= 0 or growth <= 1:
        return None
    needed = math.log(factor) / math.log(growth) * doublings
    if needed > math.log2(MAX_EXTRAPOLATION):
        return None
    more = whole["answers"] * (2**needed - 1)
    unit: int = 10 ** max(0, math.floor(math.log10(max(1.0, more))) - 1)
    return math.ceil(more / unit) * unit


def _on_corpus(stages: Mapping[str, Mapping[str, Any]], steps: Mapping[str, float]) -> Iterator[str]:
    gain = source_gains(steps).get("corpus")
    if gain is None or gain >= MIN_GAIN:
        return
    without = steps["corpus"] / gain
    if built := stages.get("corpus_index"):
        name = f"corpus-{Path(built['folder']).parent.name[:SHOWN_FINGERPRINT_DIGITS]}"
        remedy = f"leave --corpus out and remove its index with hdtool stores remove {name}"
    else:
        remedy = "draft with --corpus-db none"
    yield (
        f"the corpus brought nothing ({without:.2f} tokens per step without it, {steps['corpus']:.2f} with it): "
        f"{remedy}, or name texts that answers quote"
    )


def _on_history(steps: Mapping[str, float]) -> Iterator[str]:
    gain = source_gains(steps).get("history")
    if gain is not None and gain >= MIN_GAIN:
        yield (
            f"the history brought {gain - 1:.0%} more tokens per step: answer in one process, such as hdtool serve, or "
            "keep it on disk with --history home"
        )
