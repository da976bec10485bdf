"""Splits examples into training and validation sets, and draws batches from seed and step alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.builders.heads.examples import Example
from hdtool.runtime.config import TrainConfig

SORTED_BATCHES = 16
"""The examples of this many batches are sorted by length, so that batches need little padding."""


class BatchSampler:
    """Batches of examples; a resumed training reads the same ones."""

    def __init__(self, examples: Sequence[Example], config: TrainConfig) -> None:
        order = np.random.default_rng((config.seed, len(examples))).permutation(len(examples))
        count = min(max(1, round(config.val_fraction * len(examples))), len(examples) - 1)
        self.validation = [examples[place] for place in sorted(order[:count])] or list(examples)
        self.train = [examples[place] for place in sorted(order[count:])]
        self._seed = config.seed
        self._batch = min(config.batch, len(self.train))
        self._batches = -(-len(self.train) // self._batch)
        self.steps = max(1, round(config.epochs * self._batches))
        self._epoch, self._order = 0, self._ordered(0)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(len(example.ids) for example in self.train)

    def step(self, number: int) -> list[Example]:
        """The batch of a step; the last batch of an epoch is filled with its first examples."""
        epoch, place = divmod(number, self._batches)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._ordered(epoch)
        return [self.train[place] for place in self._order[place]]

    def _ordered(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng((self._seed, epoch, 1))
        order = random.permutation(len(self.train))
        order = np.resize(order, self._batches * self._batch)
        chunk = SORTED_BATCHES * self._batch
        batches: list[list[int]] = []
        for start in range(0, len(order), chunk):
            part = sorted(order[start : start + chunk].tolist(), key=lambda place: len(self.train[place].ids))
            batches += [part[first : first + self._batch] for first in range(0, len(part), self._batch)]
        return [batches[place] for place in random.permutation(len(batches))]
