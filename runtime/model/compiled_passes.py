"""The interface of compiled passes, which take the place of a model's own while it stays the one that was compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hdtool.runtime.model.cache.slots import Cache, Slot
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified, Want


class CompiledPasses(Protocol):
    """Passes of one model; each method returns None for a pass that the model's own code computes."""

    is_current: bool
    """Whether the model was the compiled one when the last prompt was read."""

    def check(self, *, again: bool = True) -> None:
        """Before a prompt is read, find out whether the model is the compiled one; ``again`` if it may have changed."""
        ...

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        """Give hidden states in each pass from now on, and behind them the outputs of these layers.

        The hooks that watch the model by now belong to it.
        """
        ...

    def read(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor | None:
        """Read tokens after those of a slot; the logits ``[1, vocabulary]`` after the last one.

        If this returns None, the slot may have some of the tokens.
        """
        ...

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[Want] = ()) -> list[Verified] | None:
        """Verify a tree in each of the first slots."""
        ...

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified | None:
        """Verify a tree in one slot of several."""
        ...

    def use_int8_activations(self) -> bool:
        """Multiply packed weights by activations in 8 bits from now on; whether the model has any."""
        ...

    @property
    def pads(self) -> bool:
        """Whether trees that are verified in one pass are padded to the largest."""
        ...

    @property
    def activations_are_int8(self) -> bool: ...
