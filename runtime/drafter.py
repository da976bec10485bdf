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


@runtime_checkable
class SeededDrafter(Protocol):
    """A drafter that predicts which tokens will be drawn with a seed."""

    def set_seed(self, seed: int | None) -> None:
        """Set the seed of the answer that ``begin`` starts next; None if it is greedy."""
        ...


def reads_logits(drafter: Drafter) -> bool:
    """Whether a drafter reads the logits that it observes; true unless it has this property."""
    return bool(getattr(drafter, "reads_logits", True))


class NoDraft:
    """Plain decoding: every tree is empty."""

    seconds: Mapping[SourceName, float] = {}
    reads_logits = False

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int]) -> DraftTree:
        return DraftTree.bare(context[-1])

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        pass


class WrappedDrafter:
    """A drafter that passes everything on to another one; subclasses add to it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        return self._drafter.seconds

    @property
    def reads_logits(self) -> bool:
        return reads_logits(self._drafter)

    def set_seed(self, seed: int | None) -> None:
        if isinstance(self._drafter, SeededDrafter):
            self._drafter.set_seed(seed)

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def predict(self, prediction: Sequence[int]) -> None:
        if isinstance(self._drafter, HistoryDrafter):
            self._drafter.predict(prediction)

    def draft(self, context: Sequence[int]) -> DraftTree:
        return self._drafter.draft(context)

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        self._drafter.observe(accepted, logits)

    def end(self) -> None:
        if isinstance(self._drafter, HistoryDrafter):
            self._drafter.end()
