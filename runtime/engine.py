"""The interface of engines: what computes forward passes over draft trees, and keeps keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch

from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.pass_log import PassLog
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified, Want


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
        """Whether a pass over a single tree runs on a device by itself until ``wait``."""
        ...

    @property
    def changes(self) -> int:
        """How often the model was found changed; keys and values from before are void."""
        ...

    def context_limit(self, prompt_length: int) -> int | None:
        """The length of context at which a conversation with such a prompt ends; None if there is no limit."""
        ...

    def reads_in_pieces(self, length: int) -> bool:
        """Whether a prompt of this length may be read in several passes, with the same result."""
        ...

    def is_unchanged(self, *, goes_on: bool) -> bool:
        """Whether a prompt may go on from states that were kept: the model computes what it did before.

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

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[Want] = ()) -> list[Verified]:
        """Verify one tree in each of the first slots, all in one pass."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether it verifies trees; otherwise only chains, whose nodes follow each other."""
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
