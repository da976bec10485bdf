"""Tasks of a set of questions: its categories, with those of MT-bench pooled as in Spec-Bench."""

from __future__ import annotations

from collections.abc import Sequence

from hdtool.data.prompts import Prompt, alternating, of_all_categories

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench pools as one task."""
POOLED = "mt_bench"


def tasks_of(categories: Sequence[str]) -> list[str]:
    """The task of each question, by the categories of all of them."""
    # Other sets of questions may have a category `math` too.
    pooled = len(set(categories) & set(MT_BENCH)) > 1
    return [POOLED if pooled and category in MT_BENCH else category for category in categories]


def of_each_task(prompts: Sequence[Prompt], each: int) -> list[Prompt]:
    """The first prompts of every task, alternating between tasks; a pooled task alternates between its categories."""
    groups: dict[str, list[Prompt]] = {}
    for task, prompt in zip(tasks_of([prompt.category for prompt in prompts]), prompts, strict=True):
        groups.setdefault(task, []).append(prompt)
    return alternating(of_all_categories(group, each) for group in groups.values())
