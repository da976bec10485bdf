"""The rows of a pass as trees: which row follows which, by levels of equal depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.tree import DraftTree

Rows = npt.NDArray[np.int64]


class Level(NamedTuple):
    """The rows of equal depth, of all slots."""

    rows: torch.Tensor
    """Their places among the rows of all slots."""
    above: torch.Tensor
    """The place of the parent of each in the level above; in the first level, the slot."""


class RowTree:
    """The trees of a pass, one for each slot, whose rows are padded to the largest one."""

    def __init__(self, trees: Sequence[DraftTree], device: torch.device) -> None:
        self.slots, self.rows = len(trees), max(map(len, trees)) + 1
        self._device = device
        self.parents: list[Rows] = [np.concatenate([[-1], tree.parents + 1]).astype(np.int64) for tree in trees]
        """The row above each row; -1 for the root."""
        self.depths: list[Rows] = [np.asarray(tree.depths, np.int64) for tree in trees]

    @cached_property
    def levels(self) -> list[Level]:
        levels = []
        for depth in range(int(max(one.max() for one in self.depths)) + 1):
            rows, above = [], []
            for slot, (parents, depths) in enumerate(zip(self.parents, self.depths, strict=True)):
                at = np.flatnonzero(depths == depth)
                rows.append(at + slot * self.rows)
                above.append(self.places[slot, parents[at]] if depth else np.full(len(at), slot))
            levels.append(Level(self._sent(np.concatenate(rows)), self._sent(np.concatenate(above))))
        return levels

    @cached_property
    def places(self) -> Rows:
        """The place of each row in its level, ``[slots, rows]``."""
        places = np.zeros((self.slots, self.rows), np.int64)
        counts: dict[int, int] = {}
        for slot, depths in enumerate(self.depths):
            for row, depth in enumerate(depths.tolist()):
                places[slot, row] = counts.get(depth, 0)
                counts[depth] = counts.get(depth, 0) + 1
        return places

    def _sent(self, numbers: Rows) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)
