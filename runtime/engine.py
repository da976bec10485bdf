"""The interface of engines, which compute forward passes over draft trees and own the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.topk import Rankable, argmax, for_topk, topk
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.slots import Slot


class PassOptions(NamedTuple):
    """Outputs that a caller uses beside the logits of a pass. They are optimizations that an engine may ignore."""

    walk: bool = False
    """The walk down the tree by arg-max."""
    rank: bool = False
    """What top-k needs of each row."""
    max_ranked: int = 0
    """Tokens read of each row's ranking, if at most ``MAX_RANKED``."""
    root: bool = False
    """The logits of the root on the host."""


LOGITS_ONLY = PassOptions()
ALL_ROWS = slice(None)


class Walk(NamedTuple):
    """The token that is chosen at each node of a walk down a tree, and the child that has it."""

    tokens: list[int]
    path: list[int]
    finite: bool
    """True if all logits that decided are finite."""

    @classmethod
    def of(cls, walked: Array, length: int, finite: bool) -> Walk:
        """Read a walk that compiled code has written: a row of tokens and one of nodes."""
        tokens, path = walked[:, :length].tolist()
        return cls(tokens, path, finite)

    def first(self, max_tokens: int) -> Walk:
        """The walk truncated to ``max_tokens`` tokens; the logits of a truncated walk are finite."""
        return self if len(self.tokens) <= max_tokens else Walk(self.tokens[:max_tokens], self.path[:max_tokens], True)


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

    def topk(self, k: int, rows: slice = ALL_ROWS) -> tuple[Array, Array]:
        """The top tokens of each of some rows, best first, and their logits; see ``topk`` of the kernels."""
        if self.ranked is None or self.ranked[0].shape[1] < k:
            return topk(self.rankable()[rows], k)
        tokens, scores = (np.ascontiguousarray(part[rows, :k]) for part in self.ranked)
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


PREFILL_PASS = -1
"""The number of nodes of a pass that verified no tree."""


@dataclass(slots=True)
class PassLog:
    """The number of passes and the last one's shape and duration, from which budgets learn the cost of drafts."""

    passes: int = 0
    seconds: float = 0.0
    nodes: int = PREFILL_PASS
    """Draft tokens that the last pass verified. Of several trees, those of the largest, to which the others are padded;
    without padding, the rows of all trees but one."""
    slots: int = 1
    """Trees of the last pass that verified any."""
    last_seconds: float = 0.0
    context: int = 0
    """Tokens before the tree of the last pass. Of several trees, those of the longest context, to which the others are
    padded; without padding, the mean."""

    experts: int = 0
    """Experts whose weights the last pass read, over all layers; 0 if the engine counts none."""

    def add(self, seconds: float, nodes: int = PREFILL_PASS, slots: int = 1, experts: int = 0) -> None:
        self.seconds += seconds
        self.passes += 1
        self.experts = experts
        self.nodes, self.last_seconds = nodes, seconds
        if nodes != PREFILL_PASS:
            self.slots = slots

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Count no pass of this block: it belongs to a check or a measurement."""
        before = astuple(self)
        try:
            yield
        finally:
            for field, value in zip(fields(self), before, strict=True):
                setattr(self, field.name, value)


class Engine(Protocol):
    """Computes passes; `Target` does so with a model of transformers.

    The slots of a cache hold one sequence each. The last emitted token of a sequence is the root of its next tree: it
    is verified with the nodes, and its keys and values are in the cache only after that.
    """

    vocabulary: int
    """Tokens with an embedding."""
    device: torch.device
    log: PassLog
    """What passes have cost."""
    busy: Lock
    """Held during a step: one thread at a time uses an engine."""

    @property
    def cache(self) -> Cache:
        """The cache of answers that come one after another."""
        ...

    @property
    def captures(self) -> bool:
        """True if a pass over a single tree runs on a device by itself until ``wait``."""
        ...

    @property
    def changes(self) -> int:
        """How often the model was found changed; keys and values from before are void."""
        ...

    def context_limit(self, prompt_length: int) -> int | None:
        """The length of context at which a conversation with such a prompt ends; None if there is no limit."""
        ...

    def reads_in_pieces(self, length: int) -> bool:
        """Return True if a prompt of this length may be read in several passes, with the same result."""
        ...

    def is_unchanged(self, *, goes_on: bool) -> bool:
        """Return True if a prompt may go on from states that were kept: the model computes what it did before.

        Asked before each prompt where keys and values do not tell it.
        """
        ...

    def notice_changes(self) -> None:
        """Look for changes of the model; called before a prompt is read."""
        ...

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        """A cache for this many sequences; it grows as they need it."""
        ...

    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        """Read tokens into a slot after the first ``start`` ones, which it holds; the rest of what it holds is dropped.

        The result has one row of logits, after the last token. ``room`` is the number of tokens that may follow.
        """
        ...

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[PassOptions] = ()) -> list[Verified]:
        """Verify one tree in each of the first slots, all in one pass."""
        ...

    @property
    def takes_trees(self) -> bool:
        """True if it verifies trees; otherwise only chains, whose nodes follow each other."""
        ...

    def fitted(self, cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        """The part of a drafted tree that the next pass of a slot verifies."""
        ...

    def wait(self) -> None:
        """Wait for a pass that still runs."""
        ...

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to a slot; the rest of its tree is discarded."""
        ...

    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        """Verify the root of a slot without drafts, after a pass with drafts overflowed."""
        ...

    def note_overflow(self) -> None:
        """Tell the user once that logits were NaN or infinite."""
        ...
