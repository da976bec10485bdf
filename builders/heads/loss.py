"""The loss of drafting heads: cross-entropy with the target's probabilities and with the tokens of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hdtool.builders.heads.examples import Example
from hdtool.runtime.drafters.heads.modules import Heads


class Batch(NamedTuple):
    """Examples of one pass, padded at the end, which causal attention never reads."""

    ids: torch.Tensor
    drafted: torch.Tensor
    """Which of the tokens the model wrote."""

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device) -> Batch:
        ids = pad_sequence([torch.from_numpy(example.ids) for example in examples], batch_first=True)
        drafted = pad_sequence([torch.from_numpy(example.drafted) for example in examples], batch_first=True)
        return cls(ids.to(device), drafted.to(device))


class Places(NamedTuple):
    """The positions of a batch at which heads are trained, and which heads have a label there."""

    rows: torch.Tensor
    columns: torch.Tensor
    known: torch.Tensor
    """``[heads, places]``"""


def places_of(batch: Batch, heads: int) -> Places:
    """At column t, the first head predicts the token at t + 2, the next one that at t + 3, and so on."""
    length = batch.drafted.shape[1]
    padded = functional.pad(batch.drafted, (0, heads + 2))
    known = torch.stack([padded[:, ahead : ahead + length] for ahead in range(2, heads + 2)])
    rows, columns = known.any(dim=0).nonzero(as_tuple=True)
    return Places(rows, columns, known[:, rows, columns])


def head_labels(batch: Batch, places: Places) -> torch.Tensor:
    """The tokens that the heads predict, ``[heads, places]``; arbitrary where there is no label."""
    last = batch.ids.shape[1] - 1
    ahead = torch.arange(2, len(places.known) + 2, device=batch.ids.device)[:, None]
    return batch.ids[places.rows, (places.columns + ahead).clamp_max(last)]


def head_logits(heads: Heads, hidden: torch.Tensor, embedded: torch.Tensor, places: Places) -> torch.Tensor:
    """``[heads, places, vocabulary]`` from hidden states and the embeddings of the next tokens."""
    stages = [stage[places.rows, places.columns] for stage in heads.stages(hidden, embedded)]
    return heads.logits(heads.states(stages))


class HeadsLoss(torch.nn.Module):
    """The loss as a module, which ``accelerate`` can wrap."""

    def __init__(self, heads: Heads, lm_weight: float) -> None:
        super().__init__()
        self.heads = heads
        self._lm_weight = lm_weight

    def forward(
        self, batch: Batch, places: Places, hidden: torch.Tensor, embedded: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses over all labels, and the number of labels that are each head's arg-max.

        ``target`` holds the target's logits at every token.
        """
        labels = head_labels(batch, places)
        logits = head_logits(self.heads, hidden, embedded, places)
        total = logits.new_zeros((), dtype=torch.float32)
        hits = []
        last = target.shape[1] - 1
        for head, (all_logits, known) in enumerate(zip(logits, places.known, strict=True)):
            predicted, label = all_logits[known].float(), labels[head][known]
            probs = target[places.rows, (places.columns + head + 1).clamp_max(last)][known].float().softmax(-1)
            logs = predicted.log_softmax(-1)
            total = total - (probs * logs).sum()
            if self._lm_weight:
                total = total - self._lm_weight * logs.gather(-1, label[:, None]).sum()
            hits.append((predicted.detach().argmax(-1) == label).sum())
        return total, torch.stack(hits)
