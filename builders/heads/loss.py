"""The loss of drafting heads: cross-entropy with the target's probabilities and with the tokens of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from hdtool.builders.heads.cross_entropy import cross_entropy
from hdtool.builders.heads.examples import Example
from hdtool.builders.heads.frozen_target import FrozenTarget, TargetOutput
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
    """``[heads, places, tokens]`` from hidden states and the embeddings of the next tokens."""
    return heads.logits(heads.along(hidden, embedded, places.rows, places.columns))


def draft_labels(heads: Heads, labels: torch.Tensor) -> torch.Tensor:
    """Token ids as indices of the draft vocabulary; -1 for tokens that it does not have."""
    if heads.token_ids is None:
        return labels
    indices = labels.new_full((heads.shape.vocabulary,), -1)
    indices[heads.token_ids] = torch.arange(heads.vocabulary, device=labels.device)
    return indices[labels]


class TargetProbs(NamedTuple):
    """The target's probabilities of the tokens of the draft vocabulary, at the positions before labels."""

    probs: torch.Tensor
    """``[positions, tokens]``; each position is computed once, for all heads that predict its token."""
    row_of: torch.Tensor
    """``[batch, tokens]``: the row of ``probs`` for each position."""

    @classmethod
    def of(cls, target: FrozenTarget, output: TargetOutput, batch: Batch, heads: Heads) -> TargetProbs:
        is_read = functional.pad(batch.drafted[:, 2:], (1, 1))
        rows, columns = is_read.nonzero(as_tuple=True)
        row_of = torch.zeros_like(batch.ids)
        row_of[rows, columns] = torch.arange(len(rows), device=rows.device)
        logits = target.logits_at(output, rows, columns, heads.token_ids)
        return cls(logits.softmax(-1, dtype=torch.float32), row_of)


class HeadsLoss(torch.nn.Module):
    """The loss as a module, which ``accelerate`` can wrap."""

    def __init__(self, heads: Heads, lm_weight: float) -> None:
        super().__init__()
        self.heads = heads
        self._lm_weight = lm_weight

    def forward(
        self, batch: Batch, places: Places, hidden: torch.Tensor, embedded: torch.Tensor, target: TargetProbs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses over all labels, and the number of labels that are each head's arg-max.

        A label outside of the draft vocabulary has no loss: its probability cannot be learned.
        """
        labels = draft_labels(self.heads, head_labels(batch, places))
        states = self.heads.along(hidden, embedded, places.rows, places.columns)
        total = states.new_zeros((), dtype=torch.float32)
        hits = []
        last = batch.ids.shape[1] - 1
        for head, known in enumerate(places.known & (labels >= 0)):
            output = self.heads.output(head)
            rows = target.row_of[places.rows, (places.columns + head + 1).clamp_max(last)][known]
            narrowed, own = output.narrowed(states[known, head]), labels[head][known]
            loss, right = cross_entropy(
                narrowed, output.up.weight, target.probs, rows, own, self._lm_weight, output.up.bias
            )
            total = total + loss
            hits.append(right)
        return total, torch.stack(hits)
