"""The frozen target while heads learn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.model.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Taught(NamedTuple):
    """What the target thinks at every token of a batch."""

    hidden: torch.Tensor
    logits: torch.Tensor
    embedded: torch.Tensor
    """The tokens behind each, embedded; at the last column, any."""


class FrozenTarget:
    """A target whose hidden states are watched."""

    def __init__(self, target: Target) -> None:
        self.model: PreTrainedModel = target.model
        self.device = target.device
        self._target = target
        self.model.requires_grad_(False)
        target.watch_hidden()

        tried = self.read(torch.zeros((1, 2), dtype=torch.int64, device=self.device))
        self.hidden_width = int(tried.hidden.shape[-1])
        self.vocabulary = int(tried.logits.shape[-1])

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> Taught:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        if not logits.isfinite().all():
            raise ModelError("the model's logits are not numbers: heads cannot learn from it; try --dtype float32")
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids.roll(-1, dims=1))
        return Taught(self._target.all_hidden, logits, embedded)
