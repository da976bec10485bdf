"""Several answers at once: one pass checks the trees of all of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from hdtool.runtime.decode import DecodeState, Step
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.model.attention_masks import batch_mask, tree_mask
from hdtool.runtime.model.kv_cache import SlotKVCache, StaticKVCache
from hdtool.runtime.model.target import Target, rows_needed
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.tree import DraftTree

Key = TypeVar("Key")


@dataclass(frozen=True)
class Request(Generic[Key]):
    """A prompt that waits for a seat."""

    key: Key
    """Whose it is, for whoever asked."""
    prompt: Sequence[int]
    sampler: Sampler
    drafter: Drafter = field(default_factory=NoDraft)
    """Of this conversation alone, until it ends."""
    stops: Container[int] = ()
    """Tokens that end this answer; none given, those of the whole batch do."""


class BatchSlots:
    """The target's memory of several conversations, the taken seats in front."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._size = size
        self._rows: list[StaticKVCache] = []
        self._pending: list[int] = []
        self._lay_out(0)

    @torch.inference_mode()
    def prefill(self, slot: int, context: Sequence[int], room: int) -> torch.Tensor:
        """Read a whole context in a seat and return the logits ``[1, vocabulary]`` that follow it."""
        if (needed := rows_needed(context, room)) > self._memory.capacity:
            self._lay_out(needed)
        self._pending[slot] = len(context)
        self._rows[slot].clear_from(len(context))
        return self._target.read(context, self._rows[slot])

    @torch.inference_mode()
    def recompute(self, slot: int, root: int) -> torch.Tensor:
        """Verify the root alone for one conversation, after a pass with drafts that overflowed."""
        target, rows = self._target, self._rows[slot]
        rows.clear_from(rows.length)
        all_hidden = target.all_hidden
        mask = tree_mask(DraftTree.bare(root), rows.length, target.windows, target.dtype, target.device)
        logits = target.forward([[root]], [[rows.length]], mask, rows)[0]
        target.all_hidden = all_hidden  # the other conversations still read theirs
        return logits

    @torch.inference_mode()
    def verify(self, trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Check a tree in each of the first seats: logits ``[1 + nodes, vocabulary]`` of each."""
        target = self._target
        lengths = [rows.length for rows, _ in zip(self._rows, trees, strict=False)]
        most = max(map(len, trees)) + 1
        tokens = [tree.all_tokens + [tree.root] * (most - 1 - len(tree)) for tree in trees]
        positions = [
            (length + tree.depths).tolist() + [length] * (most - 1 - len(tree))
            for tree, length in zip(trees, lengths, strict=True)
        ]
        mask = batch_mask(trees, lengths, target.windows, target.dtype, target.device)
        for rows, length in zip(self._rows, lengths, strict=False):
            rows.used = max(rows.used, length + most)
        logits = target.forward(tokens, positions, mask, SlotKVCache(self._memory, lengths, most))
        self._pending[: len(trees)] = [1] * len(trees)
        return [logits[slot, : len(tree) + 1] for slot, tree in enumerate(trees)]

    @torch.inference_mode()
    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Make the root and the nodes of ``path`` part of a seat's context."""
        self._rows[slot].commit(self._pending[slot], path)

    @torch.inference_mode()
    def move(self, slot: int, to: int) -> None:
        self._rows[to].copy_from(self._rows[slot])

    @torch.inference_mode()
    def _lay_out(self, capacity: int) -> None:
        """Take memory for conversations of ``capacity`` tokens, and those that are going on into it."""
        self._memory = self._target.memory(capacity, self._size)
        rows = [StaticKVCache(self._memory.of_slot(slot)) for slot in range(self._size)]
        for new, old in zip(rows, self._rows, strict=False):
            new.copy_from(old)
        self._rows, self._pending = rows, [0] * self._size


def decode_batch(
    target: Target,
    ask: Callable[[], Request[Key] | None],
    size: int,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
) -> Iterator[tuple[Request[Key], Step]]:
    """Answer prompts, ``size`` of them at once; who is done makes place for the next.

    Whenever a seat is free the next request is asked for, so requests may depend on answers before. Who has none
    now may have one when another answer has ended.
    """
    slots = BatchSlots(target, size)
    taken: list[tuple[Request[Key], DecodeState]] = []
    while True:
        while len(taken) < size and (request := ask()) is not None:
            turn = DecodeState(
                target,
                request.prompt,
                request.sampler,
                max_new_tokens=max_new_tokens,
                stops=request.stops or stops,
                drafter=request.drafter,
            )
            logits = slots.prefill(len(taken), turn.begin(), turn.room)
            step = _answered(slots, len(taken), turn, logits)
            if not step.finish:
                taken.append((request, turn))
            yield request, step
        if not taken:
            return
        verified = slots.verify([turn.draft() for _, turn in taken])
        steps = []
        for slot, (_, turn) in enumerate(taken):
            target.select_slot(slot)
            steps.append(_answered(slots, slot, turn, verified[slot]))
        for (request, _), step in zip(taken, steps, strict=True):
            yield request, step
        for slot in range(len(taken) - 1, -1, -1):
            if steps[slot].finish:
                last = taken.pop()
                if slot < len(taken):
                    slots.move(len(taken), to=slot)
                    taken[slot] = last


def _answered(slots: BatchSlots, slot: int, turn: DecodeState, logits: torch.Tensor) -> Step:
    accepted, logits = turn.accept(logits, partial(slots.recompute, slot))
    slots.commit(slot, accepted.path)
    return turn.observe(accepted, logits)
