"""Which rows of a pass each row reads: its ancestors, and the columns of a short convolution."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.model.recurrent.row_tree import RowTree

if TYPE_CHECKING:
    from hdtool.runtime.model.step_input import StepTensors


class TreeIndices:
    """What the closed forms need to know of the trees of a pass, on a device."""

    rows: int

    def __init__(self) -> None:
        self._windows: dict[tuple[int, int], torch.Tensor] = {}

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Whether a row reads another one: its ancestors and itself, ``[slots, rows, rows]``."""
        raise NotImplementedError

    @cached_property
    def sums(self) -> torch.Tensor:
        """``ancestors`` as numbers: a product with it sums over the path of each row."""
        return self.ancestors.float()

    @cached_property
    def hidden(self) -> torch.Tensor:
        """Which rows a row does not read, ``[slots, 1, rows, rows]``."""
        return ~self.ancestors[:, None]

    def window(self, before: int, size: int) -> torch.Tensor:
        """The columns that a convolution of this size reads for each row, ``[slots, rows, size]``.

        The first ``before`` columns are those of the state, and one for each row follows.
        """
        if (before, size) not in self._windows:
            self._windows[before, size] = self._window(before, size)
        return self._windows[before, size]

    def _window(self, before: int, size: int) -> torch.Tensor:
        raise NotImplementedError


class HostIndices(TreeIndices):
    """Those of trees that are known on the host."""

    def __init__(self, tree: RowTree, device: torch.device) -> None:
        super().__init__()
        self.rows, self._tree, self._device = tree.rows, tree, device

    @cached_property
    def ancestors(self) -> torch.Tensor:
        tree = self._tree
        read = np.zeros((tree.slots, tree.rows, tree.rows), np.bool_)
        for slot, parents in enumerate(tree.parents):
            for row, parent in enumerate(parents.tolist()):
                if parent >= 0:
                    read[slot, row] = read[slot, parent]
                read[slot, row, row] = True
        return torch.from_numpy(read).to(self._device)

    def _window(self, before: int, size: int) -> torch.Tensor:
        tree = self._tree
        columns = np.full((tree.slots, tree.rows, size), before, np.int64)
        for slot, parents in enumerate(tree.parents):
            for row, parent in enumerate(parents.tolist()):
                above = columns[slot, parent] if parent >= 0 else np.arange(before - size, before)
                columns[slot, row] = [*above[1:], before + row]
        return torch.from_numpy(columns).to(self._device)


class DeviceIndices(TreeIndices):
    """Those of a captured step, which are computed on the device. Padding reads the root alone."""

    def __init__(self, step: StepTensors) -> None:
        super().__init__()
        self._step = step
        self.rows = step.tokens.shape[1]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        bits = self._step.ancestor_mask
        nodes = torch.arange(self.rows - 1, device=bits.device)
        read = (bits[..., None] >> nodes) & 1 == 1
        root = torch.ones_like(bits[..., None], dtype=torch.bool)
        return torch.cat([root, read], -1)

    def _window(self, before: int, size: int) -> torch.Tensor:
        depth = self._step.positions - self._step.length[:, None]
        back = torch.arange(size - 1, -1, -1, device=depth.device)
        wanted = depth[..., None] - back
        is_there = self.ancestors[:, :, None] & (depth[:, None, None] == wanted[..., None])
        return torch.where(wanted >= 0, before + is_there.int().argmax(-1), before + wanted)
