"""The interface of drafters, and plain decoding without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import DraftTree


class Drafter(Protocol):
    """Proposes a draft tree for each step and is updated with what was accepted."""

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        """Seconds spent in each source since the drafter was made."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new answer with its prompt; state of the last answer is discarded."""
        ...

    def draft(self, context: Sequence[int]) -> DraftTree:
        """A tree below the last token of ``context``, which is the prompt and all tokens emitted since."""
        ...

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        """Update with the outcome of the last tree; ``logits`` has a row for its root and for each node."""
        ...


@runtime_checkable
class HistoryDrafter(Protocol):
    """What a drafter may have besides: memory of whole answers, and predictions of one."""

    def predict(self, prediction: Sequence[int]) -> None:
        """Draft the answer that ``begin`` started from these tokens, too, which it will probably hold."""
        ...

    def end(self) -> None:
        """The answer has ended: remember it."""
        ...


class NoDraft:
    """Plain decoding: every tree is empty."""

    seconds: Mapping[SourceName, float] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int]) -> DraftTree:
        return DraftTree.bare(context[-1])

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        pass
