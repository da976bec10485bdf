"""Questions for the warm-up of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice

from hdtool.data.prompts import Prompt, of_all_categories

OWN = (
    "Explain in a few sentences why leaves turn red in autumn, and what happens to the tree in winter.",
    "Write a Python function that returns the words of a text with their counts, most frequent first.",
    "A train covers 60 km in 45 minutes. How far does it travel in 2 hours at the same speed? Show each step.",
    "Write a short letter to a neighbour who has looked after the garden during the holidays.",
)
"""Asked if the questions that are not measured do not suffice."""


def questions_to_warm_up(
    measured: Sequence[Prompt], spare: Sequence[Prompt], count: int, fits: Callable[[Prompt], bool]
) -> list[Prompt]:
    """Questions that are not measured: ``spare`` ones of different categories that fit the model, then our own.

    An equal text among the measured questions excludes a question, whatever its id.
    """
    asked = {question.messages[-1]["content"] for question in measured}
    others = [question for question in spare if question.messages[-1]["content"] not in asked]
    own = [
        Prompt.from_text(text, id=f"warm-up {number}") for number, text in enumerate(OWN, start=1) if text not in asked
    ]
    usable = filter(fits, of_all_categories(others, len(others)))
    return list(islice(chain(usable, cycle(filter(fits, own))), count))
