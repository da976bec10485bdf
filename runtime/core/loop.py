"""The decoding loop: draft, verify, accept, commit and observe, for all answers in a batch.

Requests join and leave between steps (continuous batching: Orca, OSDI 2022). A single answer is a batch of one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.runtime.core.cache import Cache
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.engine import Engine, Verified, WaitForResults
from hdtool.runtime.core.prefix_cache import PrefixCache, PromptReader, is_worth_keeping
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import SequenceState, Step, draft_trees
from hdtool.runtime.core.tree import DraftTree

RESERVED_POSITIONS = 512
"""Number of cache positions reserved for each answer in a batch; the cache grows for longer answers."""
Key = TypeVar("Key")


@dataclass(frozen=True)
class Request(Generic[Key]):
    """A prompt and the options for its answer."""

    key: Key
    """Value by which the caller recognizes the request in the outcomes of the loop."""
    prompt: Sequence[int]
    sampler: Sampler
    drafter: Drafter = field(default_factory=NoDraft)
    """Drafter that no other request uses until this request ends."""
    stops: Container[int] = ()
    """Tokens that end this answer; if empty, the stops of the loop apply."""
    prediction: Sequence[int] = ()
    """Tokens that the answer will probably contain; the drafter drafts from them, and the model never reads them."""
    max_new_tokens: int | None = None
    """Maximum number of tokens in this answer; None for the limit of the loop."""
    owner: str = ""
    """Name of the tenant; cached prefixes are reused only for requests with the same owner."""


Outcome = tuple[Request[Key], Step | HdtoolError]
"""A request with its latest step, or with the error that ended its answer."""


class PendingPrefill(Generic[Key]):
    """A request whose prompt is being prefilled into a slot."""

    def __init__(self, loop: Loop[Key], request: Request[Key], state: SequenceState, reader: PromptReader) -> None:
        self.request, self.state, self.reader = request, state, reader
        self.verified: Verified | None = None
        """Logits after the prompt; None until the whole prompt is prefilled."""
        self._loop = loop

    def read(self, max_tokens: int | None = None) -> bool:
        """Prefill up to ``max_tokens`` more prompt tokens, by default all; return True once all are prefilled."""
        with self._loop:
            self.verified = self.reader.read(max_tokens)
        self.state.cached_tokens = self.reader.cached_tokens
        return self.verified is not None

    def end(self) -> None:
        """End an answer that has not joined the loop yet."""
        self.state.end()
        self._loop.forget_prefill(self)


class Loop(Generic[Key]):
    """Generates a batch of answers step by step; the caller adds and removes requests between steps.

    As a context manager, a loop locks the engine for one step. Entering it raises ModelError if another thread uses the
    engine, or if another loop has begun to use the cache after this one.
    """

    def __init__(
        self,
        engine: Engine[Any],
        cache: Cache,
        *,
        max_new_tokens: int,
        stops: Container[int] = (),
        prefixes: PrefixCache | None = None,
    ) -> None:
        """With ``prefixes``, the longest cached prefix of a prompt is not prefilled again."""
        self._engine, self._cache = engine, cache
        self._max_new_tokens, self._stops = max_new_tokens, stops
        self._prefixes = prefixes
        self._running: list[tuple[Request[Key], SequenceState]] = []
        """Answers in progress; the index of each is its slot."""
        self._pending_prefill: PendingPrefill[Key] | None = None
        self._launched: WaitForResults | None = None
        """Waits for the pass that ``launch`` started; None if there is none."""
        self._has_begun = False

    def __len__(self) -> int:
        return len(self._running)

    @property
    def is_full(self) -> bool:
        return len(self._running) + (self._pending_prefill is not None) == len(self._cache.slots)

    def _lock(self) -> None:
        if not self._engine.busy.acquire(blocking=False):
            raise ModelError("two threads use one model at once: let them take turns, or load the model for each")

    def __enter__(self) -> None:
        self._lock()
        if not self._has_begun:
            self._has_begun, self._cache.user = True, self
        if self._cache.user is not self:
            self._engine.busy.release()
            raise ModelError(
                "another conversation began on this model before this one ended: finish one before the next, "
                "answer both by decode_batch, or load the model for each"
            )

    def __exit__(self, *raised: object) -> None:
        self._engine.busy.release()

    def start(self, request: Request[Key]) -> PendingPrefill[Key]:
        """Start an answer; call the result's ``read`` until it returns True, then pass the result to ``join``."""
        assert self._pending_prefill is None and not self.is_full
        self._lock()
        try:
            self._engine.notice_changes()
        finally:
            self._engine.busy.release()
        state = SequenceState(
            self._engine,
            request.prompt,
            request.sampler,
            max_new_tokens=self._max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
            stops=request.stops or self._stops,
            drafter=request.drafter,
            prediction=request.prediction,
        )
        room = state.room if len(self._cache.slots) == 1 else min(state.room, RESERVED_POSITIONS)
        reader = PromptReader(self._engine, self._cache, len(self._running), request.prompt, room, request.owner)
        pending = PendingPrefill(self, request, state, reader)
        try:
            state.begin()
            with self:
                reader.begin(self._prefixes)
        except BaseException:
            state.end()
            raise
        self._pending_prefill = pending
        return pending

    def forget_prefill(self, pending: PendingPrefill[Key]) -> None:
        if self._pending_prefill is pending:
            self._pending_prefill = None

    def join(self, pending: PendingPrefill[Key]) -> Outcome[Key]:
        """Accept the first token after a prefilled prompt; unless it ends the answer, the answer takes a slot."""
        assert pending.verified is not None
        request, state, slot = pending.request, pending.state, len(self._running)
        self._pending_prefill = None
        with self:
            if pending.reader.slot != slot:  # answers have ended since the prefill began
                self._overwrite(slot, by=pending.reader.slot)
            outcome = self._conclude(slot, state, pending.verified)
        if _has_ended(outcome):
            state.end()
        else:
            self._running.append((request, state))
        return request, outcome

    def add(self, request: Request[Key]) -> Outcome[Key]:
        """Prefill the whole prompt of a request and accept its first token."""
        pending = self.start(request)
        try:
            pending.read()
            return self.join(pending)
        except BaseException:
            pending.end()
            raise

    def step(self) -> list[Outcome[Key]]:
        """Run one forward pass for all requests; requests whose answers end leave the loop."""
        with self:
            return self._accept(self._launch()())

    def launch(self) -> None:
        """Draft for all answers and start the pass that verifies the trees; ``finish`` completes the step."""
        with self:
            self._launched = self._launch()

    def finish(self) -> list[Outcome[Key]]:
        """Wait for the launched pass and accept tokens according to its logits."""
        assert self._launched
        with self:
            results, self._launched = self._launched(), None
            return self._accept(results)

    def _launch(self) -> WaitForResults:
        states = [state for _, state in self._running]
        trees = self._fit_trees(draft_trees(states))
        return self._engine.launch(self._cache, trees, [state.options for state in states])

    def _fit_trees(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Return the part of each tree that the engine can verify: all of it unless the engine only verifies chains."""
        if self._engine.takes_trees:
            return trees
        fitted = [self._engine.fit_tree(self._cache, slot, tree) for slot, tree in enumerate(trees)]
        for (_, state), tree in zip(self._running, fitted, strict=True):
            state.tree = tree
        return fitted

    def _accept(self, results: Sequence[Verified]) -> list[Outcome[Key]]:
        outcomes: list[Outcome[Key]] = [
            (request, self._conclude(slot, state, verified))
            for slot, ((request, state), verified) in enumerate(zip(self._running, results, strict=True))
        ]
        for slot in range(len(outcomes) - 1, -1, -1):
            if _has_ended(outcomes[slot][1]):
                self._leave(slot)
        return outcomes

    def _conclude(self, slot: int, state: SequenceState, verified: Verified) -> Step | HdtoolError:
        try:
            accepted, verified = state.accept(verified, partial(self._engine.recompute, self._cache, slot))
        except HdtoolError as error:  # an error in one request must not end the others
            return error
        self._engine.commit(self._cache, slot, accepted.path)
        return state.observe(accepted, verified)

    def remove(self, request: Request[Key]) -> None:
        """End the answer of a request; do nothing if the request is not running."""
        for slot, (running, _) in enumerate(self._running):
            if running is request:
                self._leave(slot)
                return

    def end(self) -> None:
        """End all answers. A launched pass may go on: the engine waits for it before the next one."""
        self._launched = None
        for _, state in self._running:
            state.end()
        self._running.clear()

    def _leave(self, slot: int) -> None:
        """End the answer in a slot and move the last answer into this slot."""
        _, state = self._running[slot]
        state.end()
        last = self._running.pop()
        if slot < len(self._running):
            self._overwrite(slot, by=len(self._running))
            self._running[slot] = last

    def _overwrite(self, slot: int, *, by: int) -> None:
        """Move the context of slot ``by`` to ``slot``; with a prefix cache, slot ``by`` keeps the other context."""
        if self._prefixes and is_worth_keeping(self._cache.slots[slot]):
            self._cache.swap(slot, by)
        else:
            self._cache.copy(by, to=slot)


def _has_ended(outcome: Step | HdtoolError) -> bool:
    return isinstance(outcome, HdtoolError) or outcome.finish is not None
