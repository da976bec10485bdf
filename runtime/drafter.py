"""What the loop asks for drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import DraftTree


class Drafter(Protocol):
    """Guesses what the target will say next, and learns from what it said."""

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        """Time spent in each source since the drafter exists."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt of a new generation; what was drafted from the last one is forgotten."""
        ...

    def draft(self, context: Sequence[int]) -> DraftTree:
        """A tree below the last token of ``context``: all that was begun with, and all that was observed since."""
        ...

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        """Hear what became of the last tree; ``logits`` has a row for its root and for each node."""
        ...


class NoDraft:
    """Plain decoding: nothing is ever drafted."""

    seconds: Mapping[SourceName, float] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int]) -> DraftTree:
        return DraftTree.bare(context[-1])

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        pass
