"""Continuous batching (Orca, OSDI 2022): one forward pass verifies the trees of several requests."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from hdtool.runtime.decode import DecodeState, Step
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.model.attention_masks import batch_mask, tree_mask
from hdtool.runtime.model.cache.kv_cache import SlotKVCache, StaticKVCache
from hdtool.runtime.model.step_input import TreeInput
from hdtool.runtime.model.target import Target, capacity_needed
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.tree import DraftTree

Key = TypeVar("Key")


@dataclass(frozen=True)
class Request(Generic[Key]):
    """A prompt to answer in a batch slot, and the options of its answer."""

    key: Key
    """Identifies the request in what ``decode_batch`` yields."""
    prompt: Sequence[int]
    sampler: Sampler
    drafter: Drafter = field(default_factory=NoDraft)
    """Used by this request alone until it ends."""
    stops: Container[int] = ()
    """Tokens that end this answer; if empty, those of the whole batch are used."""
    prediction: Sequence[int] = ()
    """What the answer will probably look like: it is drafted from, and never read by the model."""


class BatchSlots:
    """The KV cache of a batch of requests; the first slots are in use."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._size = size
        self._caches: list[StaticKVCache] = []
        self._pending: list[int] = []
        self._input = TreeInput(target.device)
        self._allocate(0)

    @torch.inference_mode()
    def prefill(self, slot: int, context: Sequence[int], room: int) -> torch.Tensor:
        """Prefill a slot with a whole context and return the logits ``[1, vocabulary]`` after it."""
        if (needed := capacity_needed(context, room)) > self._storage.capacity:
            self._allocate(needed)
        self._pending[slot] = len(context)
        self._caches[slot].clear_from(len(context))
        return self._target.read(context, self._caches[slot])

    @torch.inference_mode()
    def recompute(self, slot: int, root: int) -> torch.Tensor:
        """Verify the root of one slot without drafts, after a pass with drafts overflowed."""
        target, cache = self._target, self._caches[slot]
        cache.clear_from(cache.length)
        all_hidden = target.all_hidden
        mask = tree_mask(DraftTree.bare(root), cache.length, target.windows, target.dtype, target.device)
        logits = target.forward([[root]], [[cache.length]], mask, cache)[0]
        target.all_hidden = all_hidden  # the drafters of the other slots still read theirs
        return logits

    @torch.inference_mode()
    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Verify one tree in each of the first slots: logits ``[1 + nodes, vocabulary]`` for each."""
        target = self._target
        lengths = [cache.length for cache, _ in zip(self._caches, trees, strict=False)]
        mask = batch_mask(trees, lengths, target.windows, target.dtype, target.device)
        ids, positions = self._input.of_batch(trees, lengths)
        most = ids.shape[1]
        for cache, length in zip(self._caches, lengths, strict=False):
            cache.used = max(cache.used, length + most)
        logits = target.run(ids, positions, mask, SlotKVCache(self._storage, lengths, most))
        self._pending[: len(trees)] = [1] * len(trees)
        return [logits[slot, : len(tree) + 1] for slot, tree in enumerate(trees)]

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to the context of a slot."""
        self._caches[slot].commit(self._pending[slot], path)

    @torch.inference_mode()
    def move(self, slot: int, to: int) -> None:
        self._caches[to].copy_from(self._caches[slot])

    @torch.inference_mode()
    def _allocate(self, capacity: int) -> None:
        """Allocate a cache for ``capacity`` tokens a slot and copy the slots in use into it."""
        self._storage = self._target.allocate(capacity, self._size)
        caches = [StaticKVCache(self._storage.of_slot(slot)) for slot in range(self._size)]
        for new, old in zip(caches, self._caches, strict=False):
            new.copy_from(old)
        self._caches, self._pending = caches, [0] * self._size


def decode_batch(
    target: Target,
    next_request: Callable[[], Request[Key] | None],
    size: int,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
) -> Iterator[tuple[Request[Key], Step]]:
    """Answer prompts in ``size`` batch slots; finished requests are replaced (continuous batching).

    ``next_request`` is called whenever a slot is free, so a request may depend on earlier answers. If it returns
    None, it is called again after the next step.
    """
    slots = BatchSlots(target, size)
    running: list[tuple[Request[Key], DecodeState]] = []
    try:
        while True:
            while len(running) < size and (request := next_request()) is not None:
                state = DecodeState(
                    target,
                    request.prompt,
                    request.sampler,
                    max_new_tokens=max_new_tokens,
                    stops=request.stops or stops,
                    drafter=request.drafter,
                    prediction=request.prediction,
                )
                logits = slots.prefill(len(running), state.begin(), state.room)
                step = _accept_and_commit(slots, len(running), state, logits)
                if step.finish:
                    state.end()
                else:
                    running.append((request, state))
                yield request, step
            if not running:
                return
            verified = slots.verify([state.draft() for _, state in running])
            steps = []
            for slot, (_, state) in enumerate(running):
                target.select_slot(slot)
                steps.append(_accept_and_commit(slots, slot, state, verified[slot]))
            for (request, _), step in zip(running, steps, strict=True):
                yield request, step
            for slot in range(len(running) - 1, -1, -1):
                if steps[slot].finish:
                    running[slot][1].end()
                    last = running.pop()
                    if slot < len(running):
                        slots.move(len(running), to=slot)
                        running[slot] = last
    finally:
        for _, state in running:
            state.end()


def _accept_and_commit(slots: BatchSlots, slot: int, state: DecodeState, logits: torch.Tensor) -> Step:
    accepted, logits = state.accept(logits, partial(slots.recompute, slot))
    slots.commit(slot, accepted.path)
    return state.observe(accepted, logits)
