"""The heads in one conversation: fed with what the target accepted, asked for what may come next."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.heads.calibration import Calibration, bucket_of
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache
from hdtool.runtime.drafters.heads.modules import best_of
from hdtool.runtime.drafters.heads.static_pass import FixedPass
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import BEST
from hdtool.runtime.kernels.small_batch_linear import use_small_batch_products
from hdtool.runtime.model.target import Target

Array = npt.NDArray[Any]

AT_ONCE = 512
"""Rows of a prompt that are read in one pass."""


class HeadsState:
    """What the heads know of the conversation that a target is in.

    Rows of the target wait until the heads are asked: while drafting rests, nothing is computed.
    """

    def __init__(self, saved: SavedHeads, target: Target) -> None:
        self.heads = saved.heads
        self.calibration = Calibration(saved.judged.odds or None, self.heads.config.heads)
        self.seconds = 0.0
        """Spent in the heads' own passes."""
        self.passes = 0
        self.tokens = np.empty((0, 0), np.int64)
        """Each head's best tokens ``[heads, best]`` behind the last row that was read."""
        self.probs = np.empty((0, 0))
        """That each of them comes, if the path down to it was right."""
        self._target = target
        self._embed = target.model.get_input_embeddings()
        recorder = target.new_recorder()
        self._fixed = FixedPass(self.heads, self._embed, BEST, recorder) if recorder else None
        self._buckets = np.empty((0, 0), np.int64)
        self._waiting: list[tuple[torch.Tensor, list[int]]] = []
        self._is_prompt = True
        target.watch_hidden()
        if target.device.type == "cpu":
            use_small_batch_products(self.heads)
        shape = self.heads.shape
        width = shape.width // shape.attention_heads
        self._rows = HeadsKVCache(len(self.heads.layers), shape.attention_heads, width, self.heads.like)
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Another conversation: its first rows are those of the prompt, which the target has still to read."""
        self._rows.restart()
        self._waiting.clear()
        self._prompt, self._is_prompt = list(prompt), True
        self._judged = True

    def hear(self, accepted: Accepted) -> None:
        """Learn from what the target took, and keep its hidden states of the path for the next pass."""
        self._learn(accepted)
        hidden = self._target.hidden
        assert hidden is not None
        if self._is_prompt:
            self._is_prompt = False
            self._waiting.append((hidden, [*self._prompt[1:], accepted.tokens[-1]]))
            return
        rows = [0, *(node + 1 for node in accepted.path)]
        kept = hidden[: len(rows)] if rows[-1] == len(rows) - 1 else hidden[rows]
        self._waiting.append((kept, accepted.tokens))

    @torch.inference_mode()
    def look_ahead(self) -> None:
        """Read what waits and see what the heads make of it."""
        started = time.perf_counter()
        hidden = torch.cat([rows for rows, _ in self._waiting]) if len(self._waiting) > 1 else self._waiting[0][0]
        tokens = [token for _, chosen in self._waiting for token in chosen]
        self._waiting.clear()
        if not self.heads.layers:
            hidden, tokens = hidden[-1:], tokens[-1:]
        if self._fixed and self._fixed.fits(len(tokens)):
            self.tokens, shares = self._fixed.read(hidden, tokens, self._rows)
        else:
            self.tokens, shares = self._read(hidden, torch.tensor(tokens, device=hidden.device))
        self._buckets = bucket_of(shares)
        self.probs = self.calibration(self._buckets)
        self._judged = False
        self.seconds += time.perf_counter() - started
        self.passes += 1

    def _read(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[Array, Array]:
        self._rows.make_room(self._rows.length + len(tokens))
        for start in range(0, len(tokens), AT_ONCE):
            chosen = tokens[start : start + AT_ONCE]
            embedded = self._embed(chosen) if self.heads.reads_tokens else hidden[: len(chosen)]
            logits = self.heads.ahead(hidden[start : start + AT_ONCE], embedded, self._rows)
        found, shares = best_of(logits, min(BEST, logits.shape[-1]))
        return found.cpu().numpy(), shares.cpu().numpy()

    def _learn(self, accepted: Accepted) -> None:
        """Hold what came against what the heads said, once; behind a wrong token nothing is known."""
        if self._judged:
            return
        self._judged = True
        for head, token in enumerate(accepted.tokens[: len(self.tokens)]):
            self.calibration.learn(head, self._buckets[head], self.tokens[head] == token)
