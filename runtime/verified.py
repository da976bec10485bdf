"""What a forward pass computes for a draft tree, and what may be wanted of it beside logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.topk import Rankable, argmax, for_topk, topk

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.slots import Slot


class Want(NamedTuple):
    """What a caller uses of a pass beside its logits. An engine may leave it out: it saves time and changes nothing."""

    walk: bool = False
    """The walk down the tree by arg-max."""
    rank: bool = False
    """What top-k needs of each row."""
    most_ranked: int = 0
    """Tokens that are read of the ranking of each row, if that is known and at most ``MOST_RANKED``."""
    root: bool = False
    """The logits of the root on the host."""


LOGITS_ALONE = Want()
ALL_ROWS = slice(None)


class Walk(NamedTuple):
    """The token that is chosen at each node of a walk down a tree, and the child that has it."""

    tokens: list[int]
    path: list[int]
    finite: bool
    """Whether all logits that decided are finite."""

    @classmethod
    def of(cls, walked: Array, length: int, finite: bool) -> Walk:
        """Read a walk that compiled code has written: a row of tokens and one of nodes."""
        tokens, path = walked[:, :length].tolist()
        return cls(tokens, path, finite)

    def first(self, most: int) -> Walk:
        """The walk up to ``most`` tokens; a walk that goes on has found finite logits only."""
        return self if len(self.tokens) <= most else Walk(self.tokens[:most], self.path[:most], True)


@dataclass(slots=True, eq=False)
class Verified:
    """The outcome of a pass for one sequence: a row for the root and each node of its tree, or one after a prompt.

    It is valid until the next pass of the engine.
    """

    logits: torch.Tensor
    """``[rows, vocabulary]``"""
    hidden: torch.Tensor | None = None
    """Input of the output layer, ``[rows, width]``; after a prompt, of all its tokens. None unless it is watched."""
    walk: Walk | None = None
    argmax: Array | None = None
    """The token with the highest logit of each row, and in ``finite`` whether that logit is finite, if computed."""
    finite: Array | None = None
    maxima: Array | None = None
    ranked: tuple[Array, Array] | None = None
    """The highest logits of each row, if they came with the pass: their tokens, best first, and they themselves."""
    root: Array | None = None
    """The logits of the root in float32 on the host, if they came with the pass."""
    slot: Slot | None = None
    """Where the sequence is kept, if the engine says so."""

    def __len__(self) -> int:
        return len(self.logits)

    def rankable(self) -> Rankable:
        """The rows in the form from which ``topk`` selects fastest."""
        return for_topk(self.logits, self.maxima)

    def topk(self, most: int, rows: slice = ALL_ROWS) -> tuple[Array, Array]:
        """The top tokens of each of some rows, best first, and their logits; see ``topk`` of the kernels."""
        if self.ranked is None or self.ranked[0].shape[1] < most:
            return topk(self.rankable()[rows], most)
        tokens, scores = (np.ascontiguousarray(part[rows, :most]) for part in self.ranked)
        return tokens, scores

    def best(self, first: int = 0) -> Array:
        """The token with the highest logit of each row from ``first`` on."""
        return argmax(self.logits[first:]) if self.argmax is None else self.argmax[first:]

    def known_argmax(self) -> tuple[Array, Array] | None:
        """``argmax`` and ``finite``; None on a CPU if the pass has not computed them: single rows are faster there."""
        if self.argmax is not None and self.finite is not None:
            return self.argmax, self.finite
        if self.logits.is_cpu:
            return None
        tokens = self.logits.argmax(dim=-1)
        # Both in one transfer: each waits for the device.
        is_finite = self.logits.gather(-1, tokens[..., None])[..., 0].isfinite()
        self.argmax, self.finite = torch.stack([tokens, is_finite.to(tokens.dtype)]).cpu().numpy()
        return self.argmax, self.finite
