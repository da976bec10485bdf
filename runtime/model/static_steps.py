"""Steps of fixed shape, each recorded once and then repeated.

A step moves the rows that the last one kept, reads a tree and says what is likeliest after each of its
nodes. There is one for each size of trees and each extent of the cache that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.budget.node_budget import PASS_SIZES
from hdtool.runtime.kernels.topk import Logits
from hdtool.runtime.model.attention_masks import AttentionWindow, device_mask
from hdtool.runtime.model.cuda_graphs import Capture, Run
from hdtool.runtime.model.kv_cache import IndexedKVCache, Memory, StaticKVCache, must_move
from hdtool.runtime.model.placement import device_of
from hdtool.runtime.model.step_input import MOVES, StepInput
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST_EXTENT = 512
"""Rows of the cache that are read at least; longer extents are its doubles."""


class StaticSteps:
    """The steps of one model, over the memory of one conversation after another."""

    def __init__(
        self,
        model: PreTrainedModel,
        windows: list[AttentionWindow],
        vocabulary: int,
        dtype: torch.dtype,
        capture: Capture,
    ) -> None:
        """``vocabulary`` and ``dtype`` are those of the logits."""
        device = device_of(model)
        self._model, self._reaches, self._capture, self._device = model, windows, capture, device
        self._input = StepInput(device)
        rows = LARGEST_TREE + 1
        self._logits = torch.zeros((rows, vocabulary), dtype=dtype, device=device)
        self._argmax = torch.zeros((2, rows), dtype=torch.int64, device=device)
        """The arg-max of each row, and whether that logit is finite: both go to the host in one copy."""
        self._said = torch.zeros((2, rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._memory: Memory | None = None
        self._steps: dict[tuple[int, int], Run] = {}
        self._moves: tuple[int, Sequence[int]] | None = None
        self._seen: Callable[[], torch.Tensor] | None = None
        self._hidden = self._logits[:0]

    def watch(self, seen: Callable[[], torch.Tensor]) -> None:
        """Keep the hidden states of each step too; ``seen`` are those of a pass of the model that has just been."""
        like = seen()
        self._hidden = like.new_zeros((LARGEST_TREE + 1, like.shape[1]))
        self._seen = seen
        self._steps.clear()
        self._capture.forget()

    def hidden(self, used: int) -> torch.Tensor:
        """Those of the last step, in memory of their own: the next step writes over what was recorded."""
        return self._hidden[:used].clone()

    @staticmethod
    def capacity_for(needed: int, limit: int | None) -> int:
        """Rows for a conversation that needs so many: as few capacities as possible, so that steps are kept."""
        capacity = extent_for(needed)
        return capacity if limit is None else min(capacity, max(needed, limit + LARGEST_TREE + 1))

    def commit(self, rows: StaticKVCache, fixed: int, path: Sequence[int]) -> None:
        """Accept a path as ``StaticKVCache.keep`` does, but leave it to the next step to move the rows."""
        start = rows.length + fixed
        self._moves = None
        if must_move(path):
            if len(path) <= MOVES:
                self._moves = (start, path)
            else:
                rows.move(start, path)
        rows.length = start + len(path)

    def settle(self, rows: StaticKVCache) -> None:
        """Move the rows of the kept path now."""
        if self._moves:
            rows.move(*self._moves)
            self._moves = None

    def prepared(self, tree: DraftTree, rows: StaticKVCache) -> Callable[[], Logits]:
        """What checks a tree behind the context; the first of its shape is recorded on the way."""
        if rows.memory is not self._memory:
            self._steps.clear()  # frees what they had in use before there is more
            self._capture.forget()
            self._memory = rows.memory
        size = PASS_SIZES[int(np.searchsorted(PASS_SIZES, len(tree) + 1))]
        extent = min(extent_for(rows.length + size), rows.capacity)
        self._input.fill(tree, size, rows.length)
        rows.used = max(rows.used, rows.length + size)
        if (size, extent) not in self._steps:
            # It runs while it is recorded, and writes where the rows of the kept path still lie.
            self.settle(rows)
            self._input.send(size)
            self._steps[size, extent] = self._recorded(rows.memory, size, extent)
        if self._moves:
            self._input.move(*self._moves)
            self._moves = None
        return lambda: self._run(len(tree) + 1, size, extent)

    def _run(self, used: int, size: int, extent: int) -> Logits:
        self._input.send(size)
        self._steps[size, extent]()
        self._said.copy_(self._argmax, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        tokens, finite = self._said[:, :used].numpy()
        return Logits.of(self._logits[:used], tokens, finite)

    def _recorded(self, memory: Memory, size: int, extent: int) -> Run:
        told = self._input.tensors(size)
        dtype = self._model.dtype

        def run() -> None:
            rows = torch.arange(MOVES, device=self._device) + told.moved_to
            for tensor in memory.tensors:
                tensor.index_copy_(3, rows, tensor.index_select(3, told.moved_from))
            places = torch.arange(size, device=self._device) + told.length
            mask = device_mask(told.ancestor_mask, told.positions[0], told.length, extent, self._reaches, dtype)
            logits = self._model(
                input_ids=told.tokens,
                position_ids=told.positions,
                attention_mask=mask,
                past_key_values=IndexedKVCache(memory, places, extent),
                use_cache=True,
                return_dict=True,
            ).logits[0]
            self._logits[:size].copy_(logits)
            tokens, finite = self._argmax[0, :size], self._argmax[1, :size]
            torch.argmax(logits, dim=-1, out=tokens)
            finite.copy_(logits.gather(1, tokens[:, None])[:, 0].isfinite())
            if self._seen:
                self._hidden[:size].copy_(self._seen())

        return self._capture.record(run)


def extent_for(rows: int) -> int:
    extent = SHORTEST_EXTENT
    while extent < rows:
        extent *= 2
    return extent
