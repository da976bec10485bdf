"""The interface of passes with fixed tensor shapes, which can be captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hdtool.runtime.caches.recurrent_states import StatesOfTree

if TYPE_CHECKING:
    from hdtool.runtime.caches.kv_cache import KVTensors
    from hdtool.runtime.model.pass_inputs import StepTensors


class StepOutput(NamedTuple):
    """The outputs of a pass, on the device."""

    logits: torch.Tensor
    """Shape ``[slots * rows, vocabulary]``."""
    hidden: torch.Tensor | None
    """Shape ``[slots, rows, width]``; None if hidden states aren't recorded."""
    states: StatesOfTree | None = None
    """What advances recurrent states along an accepted path; None if the model has none."""


class StepPass(Protocol):
    """A pass with fixed tensor shapes over draft trees."""

    reads_extent: bool
    """True if the pass reads a fixed number of cache positions (the extent), whatever the context lengths."""

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        """Move accepted paths in the cache, then verify trees, without synchronizing or data-dependent control flow."""
        ...
