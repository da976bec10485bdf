"""The heads' pass in fixed shapes, each captured once (as a CUDA graph) and then replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache, IndexedHeadsKVCache
from hdtool.runtime.drafters.heads.modules import Heads, ParallelHeads, best_of
from hdtool.runtime.drafters.trained.ranked_block import RankedBlock
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.model.cuda_graphs import Capture, Run
from hdtool.runtime.model.static_steps import extent_for

SIZES = (1, 2, 4, 8, 16)
"""Numbers of new positions of a pass. Padding positions are overwritten by the next pass."""
HEADER = 2
"""Input words before the tokens: the length of the cache, and the index of the last new token."""

Embed = Callable[[torch.Tensor], torch.Tensor]
Best = tuple[torch.Tensor, torch.Tensor]
"""The best tokens of some heads, and their probabilities."""
Finish = Callable[[list[torch.Tensor], torch.Tensor], Best]
"""What follows the stages ``[1, width]`` of the last new token, and that token ``[1]``."""


class FixedPass:
    """Passes that read a few new tokens into a cache and compute the best tokens that follow."""

    def __init__(self, heads: Heads, embed: Embed, best: int, capture: Capture, finish: Finish | None = None) -> None:
        """``best`` is the number of tokens per head. Without ``finish``, heads draft in parallel."""
        like, number = heads.like, 1 if finish else heads.config.heads
        pinned = like.device.type == "cuda"
        self._heads, self._embed, self._capture, self._device = heads, embed, capture, like.device
        self._best = min(best, heads.vocabulary)
        self._finish = finish or self._in_parallel
        self._host = torch.zeros(HEADER + SIZES[-1], dtype=torch.int64, pin_memory=pinned)
        self._input = self._host.to(self._device, copy=True)
        self._hidden = like.new_zeros((SIZES[-1], heads.shape.width))
        self._result = RankedBlock(number, self._best, self._device)
        self._keys_values: torch.Tensor | None = None
        self._passes: dict[tuple[int, int], Run] = {}

    @staticmethod
    def fits(tokens: int) -> bool:
        return tokens <= SIZES[-1]

    def read(self, hidden: torch.Tensor, tokens: list[int], cache: HeadsKVCache) -> tuple[Array, Array]:
        """Append new tokens to the cache ``cache``; return the best tokens that follow, and their probabilities."""
        new = len(tokens)
        size = next(size for size in SIZES if size >= new)
        cache.make_room(cache.length + size)
        if cache.keys_values is not self._keys_values:
            self._passes.clear()
            self._capture.reset()
            self._keys_values = cache.keys_values
        self._host[:HEADER] = torch.tensor([cache.length, new - 1])
        self._host[HEADER : HEADER + new] = torch.tensor(tokens)
        self._input.copy_(self._host, non_blocking=True)
        self._hidden[:new].copy_(hidden)
        self._hidden[new:size] = 0  # a mask hides padding only if it is finite
        extent = extent_for(cache.length + size)
        if (size, extent) not in self._passes:
            self._passes[size, extent] = self._captured(cache.keys_values, size, extent)
        self._passes[size, extent]()
        if self._heads.layers:
            cache.length += new
        return self._result.received(len(self._result.tokens))

    def _captured(self, keys_values: torch.Tensor, size: int, extent: int) -> Run:
        heads, device_input, hidden = self._heads, self._input, self._hidden[:size]

        def run() -> None:
            indices = torch.arange(size, device=self._device) + device_input[:1]
            tokens = self._embed(device_input[HEADER : HEADER + size]) if heads.reads_tokens else hidden
            stages = heads.stages(hidden[None], tokens[None], IndexedHeadsKVCache(keys_values, indices, extent))
            last = [stage[0].index_select(0, device_input[1:HEADER]) for stage in stages]
            token = device_input[HEADER : HEADER + size].index_select(0, device_input[1:HEADER])
            self._result.write(*self._finish(last, token))

        return self._capture.record(run)

    def _in_parallel(self, stages: list[torch.Tensor], token: torch.Tensor) -> Best:
        heads = self._heads
        assert isinstance(heads, ParallelHeads)
        return best_of(heads.logits(heads.states(stages))[:, 0], self._best, heads.token_ids)
