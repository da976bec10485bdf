"""How many nodes of a draft tree are worth their share of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Odds = npt.NDArray[np.floating[Any]]


class Budget(Protocol):
    """Cuts a tree whose nodes are sorted by the odds that the target will take them."""

    @property
    def most(self) -> int:
        """Nodes that no tree needs to exceed; 0 means that drafting is not worth its time now."""
        ...

    def nodes(self, odds: Odds) -> int:
        """How many of the best nodes to send."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """As many nodes as there are, up to a number that somebody chose."""

    most: int = 32

    def nodes(self, odds: Odds) -> int:
        return min(len(odds), self.most)
