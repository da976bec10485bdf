"""Decode one sequence step by step, for tests of single passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hdtool.runtime.core.engine_interface import LOGITS_ONLY, PassOptions, Verified
from hdtool.runtime.core.prefix_cache import PrefixCache, PromptReader
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.target.target import Target


class OneSequence:
    """Target with a cache for one sequence."""

    def __init__(self, target: Target) -> None:
        self.target, self.cache = target, target.allocate()
        self.verified = Verified(torch.empty(0))
        """Result of the last pass."""
        self.cached_tokens = 0
        """Number of tokens that ``read_on`` took from the cache."""

    @property
    def length(self) -> int:
        """Number of accepted tokens."""
        return self.cache.slots[0].length

    def prefill(self, context: Sequence[int], start: int = 0, *, room: int = 64) -> torch.Tensor:
        """Read tokens after the first ``start`` cached ones, and return the logits ``[1, vocabulary]`` after them."""
        self.target.notice_changes()
        self.verified = self.target.prefill(self.cache, 0, context, start, room=room)
        return self.verified.logits

    def read_on(self, prompt: Sequence[int], *, room: int = 64) -> torch.Tensor:
        """Read a prompt from where it differs from the context, and return the logits ``[1, vocabulary]`` after it."""
        self.target.notice_changes()
        reader = PromptReader(self.target, self.cache, 0, prompt, room)
        reader.begin(PrefixCache())
        verified, self.cached_tokens = reader.read(), reader.cached_tokens
        assert verified
        self.verified = verified
        return verified.logits

    def verify(self, tree: DraftTree, options: PassOptions = LOGITS_ONLY) -> torch.Tensor:
        """Return the logits of the root and each node. ``verified`` has the other outputs that ``options`` asks for."""
        self.verified = self.target.verify(self.cache, [tree], [options])[0]
        return self.verified.logits

    def commit(self, path: Sequence[int] = ()) -> None:
        self.target.commit(self.cache, 0, list(path))
