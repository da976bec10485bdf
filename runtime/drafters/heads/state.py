"""Run drafting heads during generation: read accepted tokens with their hidden states, and rank the next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.drafters.heads.checkpoint import HydraHeads, MtpHeads, SavedHeads
from hdtool.runtime.drafters.heads.modules import Heads, HeadsKVCache, IndexedHeadsKVCache, ParallelHeads
from hdtool.runtime.drafters.trained.draft_length import pace_for
from hdtool.runtime.drafters.trained.draft_passes import READ_CHUNK, DraftPasses, on_host
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Calibration, Proposal, RankedBlock, prob_bucket
from hdtool.runtime.drafters.trained.sequential import (
    ROWS_PER_PASS,
    AcceptedTokens,
    Ranked,
    SequentialDrafter,
    SequentialModule,
)
from hdtool.runtime.engines.cuda.static_steps import Capture, Run, extent_for
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.target.target import Target

STATIC_SIZES = (1, 2, 4, 8, 16)
"""Numbers of new positions in a captured pass. The next pass overwrites padding positions."""
HEADER_WORDS = 2
"""Number of input words before the tokens: the length of the cache, and the index of the last new token."""

Embed = Callable[[torch.Tensor], torch.Tensor]
TopTokens = tuple[torch.Tensor, torch.Tensor]
"""Best tokens of each head or path, and their probabilities."""
Finish = Callable[[list[torch.Tensor], torch.Tensor], TopTokens]
"""Ranks the next tokens, given the stages ``[1, width]`` of the last new token, and that token ``[1]``."""


class FixedPass:
    """Reads a few new tokens into a cache and ranks the next tokens, by replaying captured passes."""

    def __init__(self, heads: Heads, embed: Embed, best: int, capture: Capture, finish: Finish | None = None) -> None:
        """``best`` is the number of tokens to rank per head. ``finish`` may be None for parallel heads only."""
        like, number = heads.like, 1 if finish else heads.config.heads
        pinned = like.device.type == "cuda"
        self._heads, self._embed, self._capture, self._device = heads, embed, capture, like.device
        self._best = min(best, heads.vocabulary)
        self._finish = finish or self._in_parallel
        self._host = torch.zeros(HEADER_WORDS + STATIC_SIZES[-1], dtype=torch.int64, pin_memory=pinned)
        self._input = self._host.to(self._device, copy=True)
        self._hidden = like.new_zeros((STATIC_SIZES[-1], heads.shape.width))
        self._result = RankedBlock(number, self._best, self._device)
        self._keys_values: torch.Tensor | None = None
        self._passes: dict[tuple[int, int], Run] = {}

    @staticmethod
    def fits(tokens: int) -> bool:
        return tokens <= STATIC_SIZES[-1]

    def read(self, hidden: torch.Tensor, tokens: list[int], cache: HeadsKVCache) -> tuple[Array, Array]:
        """Append new tokens to ``cache``; return the best next tokens and their probabilities."""
        new = len(tokens)
        size = next(size for size in STATIC_SIZES if size >= new)
        cache.make_room(cache.length + size)
        if cache.keys_values is not self._keys_values:
            self._passes.clear()
            self._keys_values = cache.keys_values
        self._host[:HEADER_WORDS] = torch.tensor([cache.length, new - 1])
        self._host[HEADER_WORDS : HEADER_WORDS + new] = torch.tensor(tokens)
        self._input.copy_(self._host, non_blocking=True)
        self._hidden[:new].copy_(hidden)
        self._hidden[new:size] = 0  # masking works only for finite values
        extent = extent_for(cache.length + size)
        if (size, extent) not in self._passes:
            self._passes[size, extent] = self._record(cache.keys_values, size, extent)
        self._passes[size, extent]()
        if self._heads.layers:
            cache.length += new
        return self._result.wait(len(self._result.tokens))

    def _record(self, keys_values: torch.Tensor, size: int, extent: int) -> Run:
        heads, device_input, hidden = self._heads, self._input, self._hidden[:size]

        def run() -> None:
            indices = torch.arange(size, device=self._device) + device_input[:1]
            tokens = self._embed(device_input[HEADER_WORDS : HEADER_WORDS + size]) if heads.reads_tokens else hidden
            stages = heads.stages(hidden[None], tokens[None], IndexedHeadsKVCache(keys_values, indices, extent))
            last = [stage[0].index_select(0, device_input[1:HEADER_WORDS]) for stage in stages]
            token = device_input[HEADER_WORDS : HEADER_WORDS + size].index_select(0, device_input[1:HEADER_WORDS])
            self._result.write(*self._finish(last, token))

        return self._capture.record(run)

    def _in_parallel(self, stages: list[torch.Tensor], token: torch.Tensor) -> TopTokens:
        heads = self._heads
        assert isinstance(heads, ParallelHeads)
        return topk_tokens(heads.logits(heads.states(stages))[:, 0], self._best, heads.token_ids)


PROMPT_CHUNK = 512
"""Number of prompt tokens per pass."""


class HeadsState:
    """State of parallel heads while their target generates answers: KV cache, pending input and latest rankings."""

    source = SourceId.HEADS

    def __init__(self, saved: SavedHeads, target: Target) -> None:
        assert isinstance(saved.heads, ParallelHeads)
        self.heads = saved.heads
        self.calibration = Calibration(saved.evaluation.odds or None, self.heads.config.heads)
        self.seconds = 0.0
        """Seconds spent in passes of the heads."""
        self.passes = 0
        self.tokens = np.empty((0, 0), np.int64)
        """Best tokens of each head after the last token read, ``[heads, best]``."""
        self.probs = np.empty((0, 0))
        """Probability of each token in ``tokens``, given that the path before it is accepted."""
        self._embed = target.model.get_input_embeddings()
        recorder = target.new_recorder()
        self._fixed = FixedPass(self.heads, self._embed, TOKENS_PER_RANKING, recorder) if recorder else None
        self._buckets = np.empty((0, 0), np.int64)
        self._accepted = AcceptedTokens(target.watch_hidden())
        if target.device.type == "cpu":
            compile_linear_layers(self.heads)
        self._cache = HeadsKVCache.of(self.heads)
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Begin the answer to ``prompt``, which the target must prefill next."""
        self._cache.restart()
        self._accepted.begin(prompt)
        self._proposed: Proposal | None = None
        """The proposal to compare with the next accepted tokens."""

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Update the calibration, and queue the accepted tokens with the target's hidden states along their path."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None:
            self.calibration.learn(proposed, self._buckets, accepted.tokens)
        self._accepted.add(accepted, verified)

    @torch.inference_mode()
    def propose(self, max_nodes: int) -> Proposal:
        """Read the queued tokens in a pass of the heads, and rank the next tokens; update ``tokens`` and ``probs``."""
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
        self._buckets = prob_bucket(probs)
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
        best_tokens, probs = topk_tokens(logits, TOKENS_PER_RANKING, self.heads.token_ids)
        return best_tokens.cpu().numpy(), probs.cpu().numpy()


CAPTURED_ROWS = (1, 2, ROWS_PER_PASS)
"""Numbers of rows in a captured pass that extends paths."""


def sequential_drafter(saved: SavedHeads, target: Target, *, is_measured: bool) -> SequentialDrafter:
    """Return a drafter for heads that draft token by token.

    If ``is_measured``, the drafter measures its passes and stops drafting where further passes do not pay.
    """
    columns = target.watch_hidden()
    if target.device.type == "cpu":
        compile_linear_layers(saved.heads)
    pace = pace_for(target, str(saved.heads.config), is_measured=is_measured)
    module: SequentialModule
    if isinstance(saved.heads, HydraHeads):
        module = HydraModule(saved.heads, target)
    else:
        assert isinstance(saved.heads, MtpHeads)
        module = TrainedMtp(saved.heads, target)
    return SequentialDrafter(module, pace, columns=columns, odds=saved.evaluation.odds or None)


class HydraModule:
    """Ranks next tokens with Hydra heads. A head reads a whole draft path, and each path is a row.

    Row 0 is the last accepted token; ``extend`` numbers its rows consecutively after it.
    """

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        self.passes = heads.config.heads - 1
        self._heads, self._embed = heads, target.model.get_input_embeddings()
        self._cache, self._device = HeadsKVCache.of(heads), heads.like.device
        rows = 1 + ROWS_PER_PASS * self.passes
        self._before = heads.like.new_zeros((1, heads.shape.width))
        """States that the heads read before the paths, ``[1, width]``."""
        self._paths = heads.like.new_zeros((rows, heads.config.heads, heads.shape.embedding))
        """Normed embeddings of the tokens on each path, ``[rows, heads, width]``."""
        self._depths = [0]
        """Distance of each row from row 0, in tokens."""
        reading, extending = target.new_recorder(), target.new_recorder()
        self._reading = (
            FixedPass(heads, self._embed, TOKENS_PER_RANKING, reading, self._start_path) if reading else None
        )
        self._extending = extending
        pinned = self._device.type == "cuda"
        self._host = torch.zeros((3, ROWS_PER_PASS), dtype=torch.int64, pin_memory=pinned)
        self._input = self._host.to(self._device, copy=True)
        """Input of a captured pass: the rows to extend, their new tokens, and the rows to write."""
        self._captured: dict[tuple[int, int], Run] = {}
        self._result = RankedBlock(ROWS_PER_PASS, min(TOKENS_PER_RANKING, heads.vocabulary), self._device)

    def begin(self, prompt: list[int]) -> None:
        self._cache.restart()

    def skip(self, tokens: int) -> None:
        self._cache.restart()

    @torch.inference_mode()
    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._depths = [0]
        if not self._heads.layers:
            hidden, tokens = hidden[-1:], tokens[-1:]
        if self._reading and self._reading.fits(len(tokens)):
            return self._reading.read(hidden, tokens, self._cache)
        self._cache.make_room(self._cache.length + len(tokens))
        for start in range(0, len(tokens), READ_CHUNK):
            part = hidden[start : start + READ_CHUNK]
            stages = self._heads.read(part, part, self._cache)  # Hydra's layers read no tokens
        return on_host(self._start_path(stages, torch.tensor(tokens[-1:], device=self._device)))

    @torch.inference_mode()
    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        first, new = len(self._depths), len(tokens)
        depth = self._depths[parents[0]] + 1
        self._depths += [depth] * new
        rows = list(range(first, first + new))
        if not self._extending:
            return on_host(self._extend_paths(depth, torch.tensor([parents, tokens, rows], device=self._device)))
        size = next(size for size in CAPTURED_ROWS if size >= new)
        padding = [0] * (size - new)  # padding rewrites row 0, of which only the first token is ever read
        self._host[:, :size] = torch.tensor([parents + padding, tokens + padding, rows + padding])
        self._input.copy_(self._host, non_blocking=True)
        if (depth, size) not in self._captured:
            self._captured[depth, size] = self._record(depth, size)
        self._captured[depth, size]()
        return self._result.wait(new)

    def _start_path(self, stages: list[torch.Tensor], token: torch.Tensor) -> TopTokens:
        """Store an accepted token as row 0, where all paths begin, and rank the next tokens."""
        self._before.copy_(stages[-1])
        self._paths[:1, 0].copy_(self._embed_normed(token))
        return self._best(0, self._paths[:1])

    def _extend_paths(self, depth: int, given: torch.Tensor) -> TopTokens:
        parents, tokens, rows = given
        paths = self._paths.index_select(0, parents)
        paths[:, depth] = self._embed_normed(tokens)
        self._paths.index_copy_(0, rows, paths)
        return self._best(depth, paths)

    def _embed_normed(self, tokens: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._heads.token_norm(self._embed(tokens))
        return normed

    def _best(self, head: int, paths: torch.Tensor) -> TopTokens:
        before = self._before.expand(len(paths), -1)
        states = self._heads.state(head, before, paths[:, : head + 1].flatten(1))
        return topk_tokens(self._heads.output(head)(states), TOKENS_PER_RANKING, self._heads.token_ids)

    def _record(self, depth: int, size: int) -> Run:
        assert self._extending

        def run() -> None:
            self._result.write(*self._extend_paths(depth, self._input[:, :size]))

        return self._extending.record(run)


class TrainedMtp(DraftPasses):
    """An MTP layer trained by ``train-heads``; it drafts like one from a model's checkpoint."""

    def __init__(self, heads: MtpHeads, target: Target) -> None:
        embed = target.model.get_input_embeddings()

        def run(
            tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor
        ) -> torch.Tensor:
            return heads.run(embed(tokens), hidden, positions, cache, mask)

        super().__init__(
            run,
            lambda hidden: topk_tokens(heads.output(0)(hidden), TOKENS_PER_RANKING, heads.token_ids),
            heads.shapes(),
            width=heads.shape.width,
            window=None,
            target=target,
        )
