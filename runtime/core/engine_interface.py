"""The engine interface: forward passes over draft trees, and the KV cache that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from hdtool.runtime.core.cache_interface import AnyCache, AnySlot
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.topk import Rankable, argmax, for_topk, topk

if TYPE_CHECKING:
    from hdtool.runtime.core.top_k_top_p import DrawOptions

TopTokens = tuple[torch.Tensor, torch.Tensor]
"""Top tokens of each row, best first, and their probabilities, as two tensors ``[rows, k]``."""
Ranked = tuple[Array, Array]
"""Top tokens of each row, best first, and their probabilities, as two arrays ``[rows, k]`` on the host."""


class PassOptions(NamedTuple):
    """Selects the results that the caller of a pass needs besides the logits. An engine may ignore these hints."""

    walk: bool = False
    """Compute ``Verified.walk``, the walk down the tree by argmax."""
    wants_maxima: bool = False
    """Compute ``Verified.maxima``, which makes top-k faster."""
    max_ranked: int = 0
    """Minimum number of top tokens per row that ``Verified.ranked`` should hold, at most ``MAX_RANKED``."""
    root: bool = False
    """Copy the root's logits to the host, into ``Verified.root``, unless the pass computes ``Verified.races``."""
    draws: DrawOptions | None = None
    """Compute ``Verified.races`` for draws with these options; None if the answer does not need them."""


LOGITS_ONLY = PassOptions()
ALL_ROWS = slice(None)


class Walk(NamedTuple):
    """A tree walk: the token chosen at each node, and the child with that token, or ``ROOT`` if there is none."""

    tokens: list[int]
    children: list[int]
    finite: bool
    """True if the logits of all visited nodes are finite."""

    @classmethod
    def of(cls, walk_buffer: Array, length: int, finite: bool) -> Walk:
        """Make a walk from the first ``length`` columns of ``walk_buffer``: tokens in row 0, nodes in row 1."""
        tokens, children = walk_buffer[:, :length].tolist()
        return cls(tokens, children, finite)

    def first(self, max_tokens: int) -> Walk:
        """Return the walk, shortened to at most ``max_tokens`` tokens.

        A shortened walk is always ``finite``, because a walk ends before the first row that isn't.
        """
        if len(self.tokens) <= max_tokens:
            return self
        return Walk(self.tokens[:max_tokens], self.children[:max_tokens], True)


@dataclass(slots=True, eq=False)
class Verified:
    """The result of a pass for one sequence, valid until the next pass of the engine.

    There is one row for the root and one for each node of the tree. After a prefill, the only row is that of the last
    token.
    """

    logits: torch.Tensor
    """Logits of each row, ``[rows, vocabulary]``."""
    hidden: torch.Tensor | None = None
    """Input of the output layer, then outputs of watched layers, ``[rows, columns]``; None unless drafters watch them.

    After a prefill, there is one row per token of the context, the cached ones included.
    """
    walk: Walk | None = None
    argmax: Array | None = None
    """Argmax of each row's logits; ``finite`` is True where that logit is finite. Both are None if not computed."""
    finite: Array | None = None
    maxima: Array | None = None
    ranked: tuple[Array, Array] | None = None
    """Top tokens of each row, best first, and their logits; None if the pass did not compute them."""
    root: Array | None = None
    """The root's logits in float32 on the host; None if the pass did not copy them."""
    races: Array | None = None
    """A ``RACE`` record of each row's race; None if the pass did not compute them."""
    slot: AnySlot | None = None
    """Cache slot of the sequence; None if the engine does not set it."""

    def __len__(self) -> int:
        return len(self.logits)

    def rankable(self) -> Rankable:
        """Return the logits in the representation for which ``topk`` is fastest; see ``for_topk``."""
        return for_topk(self.logits, self.maxima)

    def topk(self, k: int, rows: slice = ALL_ROWS) -> tuple[Array, Array]:
        """Return the top ``k`` tokens of each selected row, best first, and their logits, both ``[rows, k]``."""
        if self.ranked is None or self.ranked[0].shape[1] < k:
            return topk(self.rankable()[rows], k)
        tokens, scores = (np.ascontiguousarray(part[rows, :k]) for part in self.ranked)
        return tokens, scores

    def best(self, first: int = 0) -> Array:
        """Return the argmax of each row, starting with row ``first``."""
        return argmax(self.logits[first:]) if self.argmax is None else self.argmax[first:]

    def known_argmax(self) -> tuple[Array, Array] | None:
        """Return ``(argmax, finite)``, computed now if the pass has not computed them.

        For logits on the CPU, return None instead of computing them now, because computing single rows is faster there.
        """
        if self.argmax is not None and self.finite is not None:
            return self.argmax, self.finite
        if self.logits.is_cpu:
            return None
        tokens = self.logits.argmax(dim=-1)
        # Tokens and flags in one transfer, because each transfer waits for the device.
        is_finite = self.logits.gather(-1, tokens[..., None])[..., 0].isfinite()
        self.argmax, self.finite = torch.stack([tokens, is_finite.to(tokens.dtype)]).cpu().numpy()
        return self.argmax, self.finite


WaitForResults = Callable[[], list[Verified]]
"""Waits for a launched pass and returns its results, one for each tree; see ``Engine.launch``."""

PREFILL_PASS = -1
"""Value of ``PassLog.nodes`` after a pass that verified no tree."""


@dataclass(slots=True)
class PassLog:
    """Counts passes, and records the last pass's shape and duration, which budgets use to estimate costs."""

    passes: int = 0
    seconds: float = 0.0
    nodes: int = PREFILL_PASS
    """Number of draft tokens that the last pass verified. For several trees, the size of the largest one, to which the
    others are padded; without padding, the number of rows of all trees minus one."""
    slots: int = 1
    """Number of trees in the last pass that verified trees."""
    last_seconds: float = 0.0
    context: int = 0
    """Number of tokens before the tree of the last pass. For several trees, the length of the longest context, to which
    the others are padded; without padding, the mean length."""

    experts: int = 0
    """Number of experts whose weights the last pass read, summed over layers; 0 if the engine doesn't count them."""

    def add(self, seconds: float, nodes: int = PREFILL_PASS, slots: int = 1, experts: int = 0) -> None:
        self.seconds += seconds
        self.passes += 1
        self.experts = experts
        self.nodes, self.last_seconds = nodes, seconds
        if nodes != PREFILL_PASS:
            self.slots = slots

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the log after the ``with`` block, so that the passes of a check or a measurement are not counted."""
        before = astuple(self)
        try:
            yield
        finally:
            for field, value in zip(fields(self), before, strict=True):
                setattr(self, field.name, value)


SomeCache = TypeVar("SomeCache", bound=AnyCache)
"""The cache type of an engine, which reads and writes no other caches."""


class Engine(Protocol[SomeCache]):
    """Runs forward passes over draft trees; `Target` is the engine for transformers models.

    Each slot of a cache holds one sequence. The last emitted token of a sequence is the root of its next tree. The root
    is verified together with the nodes, and its keys and values are in the cache only after that pass.
    """

    vocabulary: int
    """Number of tokens with an embedding."""
    device: torch.device
    log: PassLog
    """Number and total duration of the passes so far, and the shape of the last one."""
    busy: Lock
    """Lock held during a step: only one thread at a time may use an engine."""

    @property
    def cache(self) -> SomeCache:
        """KV cache for answers that are generated one after another."""
        ...

    @property
    def captures(self) -> bool:
        """True if launched passes run asynchronously on a device."""
        ...

    @property
    def changes(self) -> int:
        """Number of times that the model has changed; keys and values computed before the last change are invalid."""
        ...

    def context_limit(self, prompt_length: int) -> int | None:
        """Return the maximum context length, prompt included, for a prompt of this length, or None if unlimited."""
        ...

    def reads_in_pieces(self, length: int) -> bool:
        """Return True if prefilling a prompt of this length in several passes gives the same result as one pass."""
        ...

    def notice_changes(self) -> None:
        """Detect changes of the model before a prompt is prefilled; raise FamilyError if it can no longer be run."""
        ...

    def notice_silent_change(self, *, goes_on: bool) -> bool:
        """Detect, by recomputing, a change that ``notice_changes`` cannot detect; return True if there is one.

        Call this before prefilling a recurrent model's prompt: recurrent states, unlike keys and values, cannot be
        compared during the prefill. ``goes_on`` is True if the prompt continues from cached states.
        """
        ...

    def allocate(self, slots: int = 1, capacity: int = 0) -> SomeCache:
        """Return a cache with this many slots, each with room for ``capacity`` tokens at first; it grows as needed."""
        ...

    def prefill(self, cache: SomeCache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        """Prefill ``tokens`` after the first ``start`` tokens in a slot, replacing all later tokens that the slot held.

        Return a result with one row of logits, for the last token. ``room`` is the number of tokens that may follow.
        """
        ...

    def launch(
        self, cache: SomeCache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()
    ) -> WaitForResults:
        """Start to verify one tree per slot, from the first slot on, in one pass; return a function for the results.

        ``options`` holds the options of each tree. Other answers may use the engine before the function is called: it
        returns the results of this pass in any case, if need be by verifying the same trees again.
        """
        ...

    @property
    def takes_trees(self) -> bool:
        """True if the engine verifies trees; False if it only verifies chains."""
        ...

    def fit_tree(self, cache: SomeCache, slot: int, tree: DraftTree) -> DraftTree:
        """Return the part of a drafted tree that the next pass can verify in a slot."""
        ...

    def commit(self, cache: SomeCache, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes in ``path`` to a slot and discard the others; do nothing after a prefill."""
        ...

    def recompute(self, cache: SomeCache, slot: int, root: int) -> Verified:
        """Verify the root of a slot without drafts, after a pass with drafts gave NaN or infinite logits."""
        ...

    def note_overflow(self) -> None:
        """Warn the user, at most once, that logits were NaN or infinite."""
        ...
