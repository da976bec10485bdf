"""Reading a prompt in pieces, after the longest beginning of it that a cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hdtool.runtime.model.cache.kv_cache import StaticKVCache

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

Prefix = tuple[StaticKVCache, int]
"""A cache, and how many of its first tokens begin a prompt."""


class PromptReader:
    """The prefill of one prompt into a cache of its own."""

    def __init__(self, target: Target, prompt: Sequence[int], prefix: Prefix | None = None) -> None:
        self._target, self._prompt = target, prompt
        self._may_stop = target.reads_in_pieces(len(prompt))
        self.cache = target.new_cache(len(prompt))
        self.cached_tokens = 0
        """Tokens at the start of the prompt that were not computed again."""
        if prefix and self._may_stop:
            held, shared = prefix
            self.cached_tokens = min(shared, len(prompt) - 1)
            self.cache.copy_from(held, self.cached_tokens)
        self._read = self.cached_tokens

    @torch.inference_mode()
    def read(self, most: int | None = None) -> torch.Tensor | None:
        """Read at most this many tokens, or all; the logits ``[1, vocabulary]`` after the prompt at its end."""
        first, end = self._read, len(self._prompt)
        if most is not None and self._may_stop:
            end = min(end, first + most)
        piece = self._prompt[first:end]
        logits = self._target.read_piece(piece, first, self.cache) if first else self._target.read(piece, self.cache)
        self._read = self.cache.length = end
        self._target.cached_tokens = self.cached_tokens
        return logits if end == len(self._prompt) else None
