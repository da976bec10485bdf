"""The frozen target model that heads are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.model.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetOutput(NamedTuple):
    """Outputs of the target at every token of a batch."""

    hidden: torch.Tensor
    logits: torch.Tensor
    embedded: torch.Tensor
    """The embedding of the next token; arbitrary in the last column."""


class FrozenTarget:
    """A target without gradients that records its hidden states."""

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
    def read(self, ids: torch.Tensor) -> TargetOutput:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        if not logits.isfinite().all():
            raise ModelError("the model's logits are not finite: heads cannot be trained on it; try --dtype float32")
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids.roll(-1, dims=1))
        return TargetOutput(self._target.all_hidden, logits, embedded)
