"""The heads' pass in fixed shapes, each recorded once and then repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache, IndexedHeadsKVCache
from hdtool.runtime.drafters.heads.modules import Heads, best_of
from hdtool.runtime.model.cuda_graphs import Capture, Run
from hdtool.runtime.model.static_steps import extent_for

SIZES = (1, 2, 4, 8, 16)
"""New rows of a pass. Rows that stand for no token are written over by those that come next."""
TOLD = 2
"""Words before the tokens: how many rows there are already, and which of the new ones is the last."""

Array = npt.NDArray[Any]
Embed = Callable[[torch.Tensor], torch.Tensor]


class FixedPass:
    """Passes over the memory of one conversation after another: behind a few rows, each head's best tokens."""

    def __init__(self, heads: Heads, embed: Embed, best: int, capture: Capture) -> None:
        """``best`` is how many tokens of each head are asked for."""
        like, number = heads.like, len(heads.steps)
        pinned = like.device.type == "cuda"
        self._heads, self._embed, self._capture, self._device = heads, embed, capture, like.device
        self._best = min(best, heads.shape.vocabulary)
        self._host = torch.zeros(TOLD + SIZES[-1], dtype=torch.int64, pin_memory=pinned)
        self._told = self._host.to(self._device, copy=True)
        self._hidden = like.new_zeros((SIZES[-1], heads.shape.width))
        self._tokens = torch.zeros((number, self._best), dtype=torch.int64, device=self._device)
        self._shares = torch.zeros((number, self._best), device=self._device)
        self._said = [torch.zeros_like(each, device="cpu", pin_memory=pinned) for each in (self._tokens, self._shares)]
        self._memory: torch.Tensor | None = None
        self._passes: dict[tuple[int, int], Run] = {}

    @staticmethod
    def fits(rows: int) -> bool:
        return rows <= SIZES[-1]

    def read(self, hidden: torch.Tensor, tokens: list[int], rows: HeadsKVCache) -> tuple[Array, Array]:
        """The best tokens of each head behind new rows, which ``rows`` keeps, and their shares."""
        new = len(tokens)
        size = next(size for size in SIZES if size >= new)
        rows.make_room(rows.length + size)
        if rows.memory is not self._memory:
            self._passes.clear()
            self._capture.forget()
            self._memory = rows.memory
        self._host[:TOLD] = torch.tensor([rows.length, new - 1])
        self._host[TOLD : TOLD + new] = torch.tensor(tokens)
        self._told.copy_(self._host, non_blocking=True)
        self._hidden[:new].copy_(hidden)
        self._hidden[new:size] = 0  # a mask hides rows of no token only if they are finite
        extent = extent_for(rows.length + size)
        if (size, extent) not in self._passes:
            self._passes[size, extent] = self._recorded(rows.memory, size, extent)
        self._passes[size, extent]()
        for said, on_device in zip(self._said, (self._tokens, self._shares), strict=True):
            said.copy_(on_device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._heads.layers:
            rows.length += new
        found, shares = (said.numpy().copy() for said in self._said)
        return found, shares

    def _recorded(self, memory: torch.Tensor, size: int, extent: int) -> Run:
        heads, told, hidden = self._heads, self._told, self._hidden[:size]

        def run() -> None:
            places = torch.arange(size, device=self._device) + told[:1]
            tokens = self._embed(told[TOLD : TOLD + size]) if heads.reads_tokens else hidden
            stages = heads.stages(hidden[None], tokens[None], IndexedHeadsKVCache(memory, places, extent))
            last = [stage[0].index_select(0, told[1:TOLD]) for stage in stages]
            found, shares = best_of(heads.logits(heads.states(last))[:, 0], self._best)
            self._tokens.copy_(found)
            self._shares.copy_(shares)

        return self._capture.record(run)
