"""Steps with fixed shapes, each captured once (as a CUDA graph) and then replayed.

A step moves the cache positions of the last accepted path if they must be moved, verifies a tree and computes the
arg-max at each of its nodes. There is one captured step for each tree size and each extent of the cache, with and
without moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.budget.pass_costs import PASS_SIZES
from hdtool.runtime.model.attention_masks import AttentionMasks
from hdtool.runtime.model.cache.kv_cache import IndexedKVCache, KVTensors, StaticKVCache
from hdtool.runtime.model.cuda_graphs import Capture, DeviceClock, Run
from hdtool.runtime.model.library import cache_argument
from hdtool.runtime.model.placement import device_of
from hdtool.runtime.model.step_input import MOVES, StepInput
from hdtool.runtime.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST_EXTENT = 512
"""The smallest number of cache positions read; larger ones are this times a power of two, or halfway between two."""


class StaticSteps:
    """The captured steps of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        masks: AttentionMasks,
        vocabulary: int,
        dtype: torch.dtype,
        capture: Capture,
    ) -> None:
        """``vocabulary`` and ``dtype`` are those of the logits."""
        device = device_of(model)
        self._model, self._masks, self._capture, self._device = model, masks, capture, device
        self._clock = DeviceClock(device)
        self._input = StepInput(device)
        rows = LARGEST_TREE + 1
        self._logits = torch.zeros((rows, vocabulary), dtype=dtype, device=device)
        self._argmax = torch.zeros((2, rows), dtype=torch.int64, device=device)
        """The arg-max of each row, and whether that logit is finite: both go to the host in one copy."""
        self._host_argmax = torch.zeros((2, rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._storage: KVTensors | None = None
        self._steps: dict[tuple[int, int, bool], Run] = {}
        self._get_hidden: Callable[[], torch.Tensor] | None = None
        self._hidden = self._logits[:0]

    def watch(self, get_hidden: Callable[[], torch.Tensor]) -> None:
        """Also copy the hidden states of each step; ``get_hidden`` returns those of the latest pass."""
        like = get_hidden()
        self._hidden = like.new_zeros((LARGEST_TREE + 1, like.shape[1]))
        self._get_hidden = get_hidden
        self.forget()

    def forget(self) -> None:
        """Capture all steps again."""
        self._steps.clear()
        self._capture.reset()

    @staticmethod
    def capacity_for(needed: int, limit: int | None) -> int:
        """The capacity for a sequence: one of few values, so that captured steps remain valid."""
        capacity = SHORTEST_EXTENT
        while capacity < needed:
            capacity *= 2
        return capacity if limit is None else min(capacity, max(needed, limit + LARGEST_TREE + 1))

    def wait(self) -> float:
        """Wait until the logits of the last step and their arg-max are there; returns the seconds that it took."""
        return self._clock.seconds()

    def prepared(self, tree: DraftTree, cache: StaticKVCache) -> Callable[[], Verified]:
        """Return the function that starts the verification of a tree; capture the step first if its shape is new.

        The step makes the move that is due in the cache.
        """
        if cache.storage is not self._storage:
            self.forget()  # frees their storage before more is allocated
            self._storage = cache.storage
        size = PASS_SIZES[int(np.searchsorted(PASS_SIZES, len(tree) + 1))]
        extent = min(extent_for(cache.length + size), cache.capacity)
        self._input.fill(tree, size, cache.length)
        cache.used = max(cache.used, cache.length + size)
        shape = size, extent, cache.due is not None
        if shape not in self._steps:
            # Capturing runs the step, which writes to the positions of the accepted path.
            cache.settle()
            self._input.send(size)
            self._steps[shape] = self._captured(cache.storage, *shape)
        if cache.due:
            self._input.move(*cache.due)
        return lambda: self._run(cache, len(tree) + 1, *shape)

    def _run(self, cache: StaticKVCache, used: int, size: int, extent: int, moves: bool) -> Verified:
        self._clock.start()
        self._input.send(size)
        with cache.moving():
            self._steps[size, extent, moves]()
        self._host_argmax.copy_(self._argmax, non_blocking=True)
        self._clock.stop()
        tokens, finite = self._host_argmax[:, :used].numpy()
        # A copy: the next replay overwrites the buffer.
        hidden = self._hidden[:used].clone() if self._get_hidden else None
        return Verified(self._logits[:used], hidden, argmax=tokens, finite=finite)

    def _captured(self, storage: KVTensors, size: int, extent: int, moves: bool) -> Run:
        inputs = self._input.tensors(size)

        def run() -> None:
            if moves:
                targets = torch.arange(MOVES, device=self._device) + inputs.moved_to
                for tensor in storage.tensors:
                    tensor.index_copy_(3, targets, tensor.index_select(3, inputs.moved_from))
            indices = torch.arange(size, device=self._device) + inputs.length
            mask = self._masks.on_device(inputs.ancestor_mask, inputs.positions[0], inputs.length, extent)
            logits = self._model(
                input_ids=inputs.tokens,
                position_ids=inputs.positions,
                attention_mask=mask,
                use_cache=True,
                **cache_argument(self._model, IndexedKVCache(storage, indices, extent)),
                return_dict=True,
            ).logits[0]
            self._logits[:size].copy_(logits)
            tokens, finite = self._argmax[0, :size], self._argmax[1, :size]
            torch.argmax(logits, dim=-1, out=tokens)
            finite.copy_(logits.gather(1, tokens[:, None])[:, 0].isfinite())
            if self._get_hidden:
                self._hidden[:size].copy_(self._get_hidden())

        return self._capture.record(run)


def extent_for(rows: int) -> int:
    """The smallest extent with so many positions."""
    extent = SHORTEST_EXTENT
    while extent < rows:
        if extent * 3 // 2 >= rows:
            return extent * 3 // 2
        extent *= 2
    return extent
