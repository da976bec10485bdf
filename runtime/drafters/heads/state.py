"""The heads during one answer: they read accepted tokens with their hidden states and rank next tokens."""

from __future__ import annotations

import time

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache
from hdtool.runtime.drafters.heads.modules import ParallelHeads, best_of
from hdtool.runtime.drafters.heads.static_pass import FixedPass
from hdtool.runtime.drafters.trained.accepted_tokens import AcceptedTokens
from hdtool.runtime.drafters.trained.calibration import Calibration, bucket_of
from hdtool.runtime.drafters.trained.proposal import BEST, Proposal
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.target import Target
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.verified import Verified

PROMPT_CHUNK = 512
"""Tokens of a prompt that are read in one pass."""


class HeadsState:
    """The heads' cache, pending input and output for the current answer of a target."""

    source = SourceName.HEADS

    def __init__(self, saved: SavedHeads, target: Target) -> None:
        assert isinstance(saved.heads, ParallelHeads)
        self.heads = saved.heads
        self.calibration = Calibration(saved.judged.odds or None, self.heads.config.heads)
        self.seconds = 0.0
        """Seconds spent in the heads' own passes."""
        self.passes = 0
        self.tokens = np.empty((0, 0), np.int64)
        """Each head's best tokens ``[heads, best]`` after the last token read."""
        self.probs = np.empty((0, 0))
        """The probability of each of them, given that the path to it is accepted."""
        self._embed = target.model.get_input_embeddings()
        recorder = target.new_recorder()
        self._fixed = FixedPass(self.heads, self._embed, BEST, recorder) if recorder else None
        self._buckets = np.empty((0, 0), np.int64)
        self._accepted = AcceptedTokens(target.watch_hidden())
        if target.device.type == "cpu":
            compile_linear_layers(self.heads)
        self._cache = HeadsKVCache.of(self.heads)
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Start another answer. Its first input is the prompt, which the target prefills next."""
        self._cache.restart()
        self._accepted.begin(prompt)
        self._proposed: Proposal | None = None
        """What the next accepted tokens are compared with."""

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Update the calibration and queue the target's hidden states of the accepted path."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None:
            self.calibration.learn(proposed, self._buckets, accepted.tokens)
        self._accepted.add(accepted, verified)

    @torch.inference_mode()
    def propose(self, most: int) -> Proposal:
        """Read the queued tokens in a pass of the heads and update ``tokens`` and ``probs``."""
        started = time.perf_counter()
        hidden, tokens, skipped = self._accepted.take()
        if skipped:
            self._cache.restart()
        if not self.heads.layers:
            hidden, tokens = hidden[-1:], tokens[-1:]
        if self._fixed and self._fixed.fits(len(tokens)):
            self.tokens, probs = self._fixed.read(hidden, tokens, self._cache)
        else:
            self.tokens, probs = self._read(hidden, torch.tensor(tokens, device=hidden.device))
        self._buckets = bucket_of(probs)
        self.probs = self.calibration(self._buckets)
        self.seconds += time.perf_counter() - started
        self.passes += 1
        self._proposed = Proposal.in_parallel(self.tokens, self.probs)
        return self._proposed

    def _read(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[Array, Array]:
        self._cache.make_room(self._cache.length + len(tokens))
        for start in range(0, len(tokens), PROMPT_CHUNK):
            chosen = tokens[start : start + PROMPT_CHUNK]
            embedded = self._embed(chosen) if self.heads.reads_tokens else hidden[: len(chosen)]
            logits = self.heads.ahead(hidden[start : start + PROMPT_CHUNK], embedded, self._cache)
        found, probs = best_of(logits, BEST, self.heads.token_ids)
        return found.cpu().numpy(), probs.cpu().numpy()
