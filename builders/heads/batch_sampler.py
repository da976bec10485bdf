"""Which lessons each step of a training reads, by seed and step alone, so that a resumed one reads the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.builders.heads.examples import Example
from hdtool.runtime.config import TrainConfig

SORTED_BATCHES = 16
"""Lessons of so many steps are sorted by length, so that those of a step need little filling up."""


class BatchSampler:
    """Lessons to learn from, and those that the heads are judged on."""

    def __init__(self, lessons: Sequence[Example], config: TrainConfig) -> None:
        order = np.random.default_rng((config.seed, len(lessons))).permutation(len(lessons))
        count = min(max(1, round(config.val_fraction * len(lessons))), len(lessons) - 1)
        self.held_out = [lessons[place] for place in sorted(order[:count])] or list(lessons)
        self.learned = [lessons[place] for place in sorted(order[count:])]
        self._seed = config.seed
        self._batch = min(config.batch, len(self.learned))
        self._a_round = -(-len(self.learned) // self._batch)
        self.steps = max(1, round(config.epochs * self._a_round))
        self._round, self._order = 0, self._ordered(0)

    @property
    def tokens(self) -> int:
        """Read in one round."""
        return sum(len(lesson.ids) for lesson in self.learned)

    def step(self, number: int) -> list[Example]:
        """Always as many lessons; the last step of a round takes some of its first ones once more."""
        number_of_round, place = divmod(number, self._a_round)
        if number_of_round != self._round:
            self._round, self._order = number_of_round, self._ordered(number_of_round)
        return [self.learned[lesson] for lesson in self._order[place]]

    def _ordered(self, number_of_round: int) -> list[list[int]]:
        random = np.random.default_rng((self._seed, number_of_round, 1))
        order = random.permutation(len(self.learned))
        order = np.resize(order, self._a_round * self._batch)
        stretch = SORTED_BATCHES * self._batch
        batches: list[list[int]] = []
        for start in range(0, len(order), stretch):
            part = sorted(order[start : start + stretch].tolist(), key=lambda lesson: len(self.learned[lesson].ids))
            batches += [part[first : first + self._batch] for first in range(0, len(part), self._batch)]
        return [batches[place] for place in random.permutation(len(batches))]
