"""Computes index tensors that describe the draft trees of a pass, for convolutions and recurrences over trees."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.core.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.pass_inputs import StepTensors

Rows = npt.NDArray[np.int64]


def parent_rows(tree: DraftTree) -> Rows:
    """Return the row of each row's parent; -1 for the root."""
    return np.concatenate([[-1], tree.parents + 1]).astype(np.int64)


class TreeIndices:
    """Index tensors that describe the trees of a pass, computed on its device; padding rows read only the root."""

    def __init__(self, step: StepTensors) -> None:
        self.step = step
        self.rows = step.tokens.shape[1]
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Tensor ``[slots, rows, rows]``, True at ``[slot, i, j]`` if row ``j`` is row ``i`` or its ancestor."""
        bits = self.step.ancestor_mask
        nodes = torch.arange(self.rows - 1, device=bits.device)
        read = (bits[..., None] >> nodes) & 1 == 1
        root = torch.ones_like(bits[..., None], dtype=torch.bool)
        return torch.cat([root, read], -1)

    @cached_property
    def sums(self) -> torch.Tensor:
        """``ancestors`` as floats, so that a matmul sums over each row's path."""
        return self.ancestors.float()

    @cached_property
    def hidden(self) -> torch.Tensor:
        """``ancestors`` negated, shape ``[slots, 1, rows, rows]``."""
        return ~self.ancestors[:, None]

    def window(self, before: int, size: int) -> torch.Tensor:
        """Return the indices of the ``size`` columns that a convolution reads for each row, ``[slots, rows, size]``.

        The first ``before`` columns are the state's, followed by one column per row.
        """
        if (before, size) not in self._windows:
            depth = self.step.positions - self.step.length[:, None]
            back = torch.arange(size - 1, -1, -1, device=depth.device)
            wanted = depth[..., None] - back
            is_there = self.ancestors[:, :, None] & (depth[:, None, None] == wanted[..., None])
            columns = torch.where(wanted >= 0, before + is_there.int().argmax(-1), before + wanted)
            self._windows[before, size] = columns
        return self._windows[before, size]
