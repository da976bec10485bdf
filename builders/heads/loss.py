"""What drafting heads are to learn: the target's own odds of the tokens ahead, and the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from hdtool.builders.heads.examples import Example
from hdtool.runtime.drafters.heads.modules import Heads


class Batch(NamedTuple):
    """Lessons of one pass, filled up behind their ends, where causal attention never looks back from."""

    ids: torch.Tensor
    drafted: torch.Tensor
    """Which of the tokens are worth drafting."""

    @classmethod
    def of(cls, lessons: Sequence[Example], device: torch.device) -> Batch:
        longest = max(len(lesson.ids) for lesson in lessons)
        ids = np.zeros((len(lessons), longest), np.int64)
        drafted = np.zeros((len(lessons), longest), np.bool_)
        for row, lesson in enumerate(lessons):
            ids[row, : len(lesson.ids)], drafted[row, : len(lesson.ids)] = lesson.ids, lesson.drafted
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(drafted).to(device))


class Places(NamedTuple):
    """Where the heads are asked: rows and columns of a batch, and which heads have an answer to learn there."""

    rows: torch.Tensor
    columns: torch.Tensor
    known: torch.Tensor
    """``[heads, places]``"""


def places_of(batch: Batch, heads: int) -> Places:
    """A head at column t speaks of the token at t + 2, the next one at t + 3, and so on."""
    length = batch.drafted.shape[1]
    padded = functional.pad(batch.drafted, (0, heads + 2))
    known = torch.stack([padded[:, ahead : ahead + length] for ahead in range(2, heads + 2)])
    rows, columns = known.any(dim=0).nonzero(as_tuple=True)
    return Places(rows, columns, known[:, rows, columns])


def head_labels(batch: Batch, places: Places) -> torch.Tensor:
    """The tokens that the heads speak of, ``[heads, places]``; where none is known, any."""
    last = batch.ids.shape[1] - 1
    ahead = torch.arange(2, len(places.known) + 2, device=batch.ids.device)[:, None]
    return batch.ids[places.rows, (places.columns + ahead).clamp_max(last)]


def head_logits(heads: Heads, hidden: torch.Tensor, embedded: torch.Tensor, places: Places) -> torch.Tensor:
    """``[heads, places, vocabulary]`` of hidden states and the embedded tokens behind them."""
    stages = [stage[places.rows, places.columns] for stage in heads.stages(hidden, embedded)]
    return heads.logits(heads.states(stages))


class HeadsLoss(torch.nn.Module):
    """The loss as a module, so that several GPUs can share it."""

    def __init__(self, heads: Heads, lm_weight: float) -> None:
        super().__init__()
        self.heads = heads
        self._lm_weight = lm_weight

    def forward(
        self, batch: Batch, places: Places, hidden: torch.Tensor, embedded: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses over what is known, and how often each head had the token first; ``target`` are
        the target's logits at every token."""
        labels = head_labels(batch, places)
        logits = head_logits(self.heads, hidden, embedded, places)
        total = logits.new_zeros((), dtype=torch.float32)
        hits = []
        last = target.shape[1] - 1
        for head, (said, known) in enumerate(zip(logits, places.known, strict=True)):
            told, label = said[known].float(), labels[head][known]
            probs = target[places.rows, (places.columns + head + 1).clamp_max(last)][known].float().softmax(-1)
            logs = told.log_softmax(-1)
            total = total - (probs * logs).sum()
            if self._lm_weight:
                total = total - self._lm_weight * logs.gather(-1, label[:, None]).sum()
            hits.append((told.detach().argmax(-1) == label).sum())
        return total, torch.stack(hits)
