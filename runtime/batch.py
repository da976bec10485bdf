"""Continuous batching (Orca, OSDI 2022): one forward pass verifies the trees of several requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from hdtool.data.errors import HdtoolError
from hdtool.runtime.decode import DecodeState, Step
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.drafters.hierarchy.batch_drafting import BatchDrafting
from hdtool.runtime.model.cache.batch_slots import BatchSlots
from hdtool.runtime.model.cache.prefix_cache import PrefixCache
from hdtool.runtime.model.cache.prompt_reader import PromptReader
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
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
    max_new_tokens: int | None = None
    """Most tokens of this answer; None is the limit of the whole batch."""
    owner: str = ""
    """Kept contexts are used again for requests of the same owner only."""


class Reading(Generic[Key]):
    """A request whose prompt is being read."""

    def __init__(self, request: Request[Key], state: DecodeState, reader: PromptReader) -> None:
        self.request, self.state, self.reader = request, state, reader
        self.logits: torch.Tensor | None = None
        """The logits after the prompt; None until all of it is read."""

    def read(self, most: int | None = None) -> bool:
        """Read at most this many tokens of the prompt, or all; return whether it is complete."""
        self.logits = self.reader.read(most)
        return self.logits is not None

    def end(self) -> None:
        """End the answer before its prompt is read."""
        self.state.end()


Outcome = tuple[Request[Key], Step | HdtoolError]
"""A step of a request, or the error that ended its answer."""


class Batch(Generic[Key]):
    """Requests that are answered together; the caller adds and removes them between steps."""

    def __init__(
        self,
        target: Target,
        size: int,
        *,
        max_new_tokens: int,
        stops: Container[int] = (),
        prefixes: PrefixCache | None = None,
    ) -> None:
        """With ``prefixes``, a prompt is read from where it differs from a context that was kept there."""
        self._target, self._size = target, size
        self._most, self._stops = max_new_tokens, stops
        self._prefixes = prefixes
        self._slots = BatchSlots(target, size)
        self._drafting = BatchDrafting()
        self._running: list[tuple[Request[Key], DecodeState]] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def is_full(self) -> bool:
        return len(self._running) == self._size

    def start(self, request: Request[Key]) -> Reading[Key]:
        """Start an answer: its prompt is read by the returned object, in one piece or several."""
        self._target.notice_changes()
        if self._prefixes:
            self._prefixes.drop_if_changed(self._target.changes)
        state = DecodeState(
            self._target,
            request.prompt,
            request.sampler,
            max_new_tokens=self._most if request.max_new_tokens is None else request.max_new_tokens,
            stops=request.stops or self._stops,
            drafter=request.drafter,
            prediction=request.prediction,
        )
        prompt = state.begin()
        prefix = self._prefixes.longest(request.owner, prompt) if self._prefixes else None
        return Reading(request, state, PromptReader(self._target, prompt, prefix))

    def join(self, reading: Reading[Key]) -> Outcome[Key]:
        """Accept the first token of an answer whose prompt is read, and put it into a free slot."""
        assert reading.logits is not None
        request, state, slot = reading.request, reading.state, len(self._running)
        cache = reading.reader.cache
        self._slots.load(slot, cache, state.room)
        outcome = self._accepted(slot, state, reading.logits)
        if self._prefixes and state.has_current_model:
            self._prefixes.keep(request.owner, request.prompt, cache)
        if _has_ended(outcome):
            state.end()
        else:
            self._running.append((request, state))
        return request, outcome

    def add(self, request: Request[Key]) -> Outcome[Key]:
        """Read the whole prompt of a request and accept its first token."""
        reading = self.start(request)
        reading.read()
        return self.join(reading)

    def step(self) -> list[Outcome[Key]]:
        """One forward pass for all requests; those whose answers end leave the batch."""
        running = list(self._running)
        trees = self._draft([state for _, state in running])
        ranks = any(state.ranks for _, state in running)
        verified = self._slots.verify(trees, [state.walks for _, state in running], rank=ranks)
        outcomes = []
        for slot, (_, state) in enumerate(running):
            self._target.select_slot(slot)
            outcomes.append(self._accepted(slot, state, verified[slot]))
        for slot in range(len(running) - 1, -1, -1):
            if _has_ended(outcomes[slot]):
                self._leave(slot)
        return [(request, outcome) for (request, _), outcome in zip(running, outcomes, strict=True)]

    def _draft(self, states: Sequence[DecodeState]) -> list[DraftTree]:
        for state in states:
            state.start_step()
        started = time.perf_counter()
        trees = self._drafting.trees([state.drafter for state in states], [state.context for state in states])
        each = (time.perf_counter() - started) / len(states)
        return [state.take(tree, each) for state, tree in zip(states, trees, strict=True)]

    def remove(self, request: Request[Key]) -> None:
        """End the answer of a request that is running."""
        for slot, (running, _) in enumerate(self._running):
            if running is request:
                self._leave(slot)
                return

    def end(self) -> None:
        """End all answers."""
        for _, state in self._running:
            state.end()
        self._running.clear()

    def _accepted(self, slot: int, state: DecodeState, logits: torch.Tensor) -> Step | HdtoolError:
        try:
            accepted, logits = state.accept(logits, partial(self._slots.recompute, slot))
        except HdtoolError as error:  # a fault of one request does not end the others
            return error
        self._slots.commit(slot, accepted.path)
        return state.observe(accepted, logits)

    def _leave(self, slot: int) -> None:
        """End the answer in a slot, keep its context, and move the last slot there."""
        request, state = self._running[slot]
        state.end()
        if self._prefixes and state.has_current_model:
            self._prefixes.keep(request.owner, state.context[: self._slots.length(slot)], self._slots.saved(slot))
        last = self._running.pop()
        if slot < len(self._running):
            self._slots.move(len(self._running), to=slot)
            self._running[slot] = last


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
    batch: Batch[Key] = Batch(target, size, max_new_tokens=max_new_tokens, stops=stops)
    try:
        while True:
            while not batch.is_full and (request := next_request()) is not None:
                yield _without_error(batch.add(request))
            if not len(batch):
                return
            for outcome in batch.step():
                yield _without_error(outcome)
    finally:
        batch.end()


def _has_ended(outcome: Step | HdtoolError) -> bool:
    return isinstance(outcome, HdtoolError) or outcome.finish is not None


def _without_error(outcome: Outcome[Key]) -> tuple[Request[Key], Step]:
    request, step = outcome
    if isinstance(step, HdtoolError):
        raise step
    return request, step
