"""Answer requests, single or batched, by the decoding loop: draft, verify, accept, commit and observe.

Requests join and leave between steps (continuous batching: Orca, OSDI 2022). A single answer is a batch of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, Generic

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.runtime.core.cache_interface import AnyCache
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.engine_interface import Engine, Verified, WaitForResults
from hdtool.runtime.core.prefix_cache import PrefixCache, PromptReader, is_worth_keeping
from hdtool.runtime.core.request import Key, Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence_state import SequenceState, draft_trees
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import DraftTree

RESERVED_POSITIONS = 512
"""Number of cache positions reserved for each answer in a batch; the cache grows for longer answers."""
Outcome = tuple[Request[Key], Step | HdtoolError]
"""A request with its latest step, or with the error that ended its answer."""


class Session(Generic[Key]):
    """Answers the requests that are submitted, as many at once as a cache has slots."""

    def __init__(
        self,
        engine: Engine[Any],
        cache: AnyCache,
        *,
        max_new_tokens: int = 0,
        stops: Container[int] = (),
        prefixes: PrefixCache | None = None,
        in_pieces: bool = False,
    ) -> None:
        """``max_new_tokens`` and ``stops`` are for requests without their own.

        With ``prefixes``, the longest cached prefix of a prompt is not prefilled again. With ``in_pieces``, prompts are
        prefilled in pieces, and running answers go on by a step after each piece; otherwise, all free slots get a
        request before the next step.
        """
        self._engine, self._cache = engine, cache
        self._max_new_tokens, self._stops = max_new_tokens, stops
        self._prefixes, self._in_pieces = prefixes, in_pieces
        self._waiting: deque[Request[Key]] = deque()
        self._prefilling: tuple[SequenceState[Key], PromptReader] | None = None
        self._running: list[SequenceState[Key]] = []
        """Answers in progress; the index of each is its slot."""
        self._cancelled = set[Request[Key]]()
        """Requests to drop before the next pass."""
        self._launched: WaitForResults | None = None
        """Waits for a pass that was started ahead; None if there is none."""
        self._is_step_due = False
        """True if running answers have waited for a piece of a prompt."""

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._waiting) + (self._prefilling is not None) + len(self._running)

    @property
    def takes_next(self) -> bool:
        """True if a request submitted now is the next one to be prefilled."""
        return not (self._is_full or self._waiting or self._prefilling)

    @property
    def _is_full(self) -> bool:
        return len(self._running) == len(self._cache.slots)

    def submit(self, request: Request[Key]) -> None:
        self._waiting.append(request)

    def cancel(self, request: Request[Key]) -> None:
        """End the answer of a request before the next pass; there are no more outcomes of it."""
        self._cancelled.add(request)

    def steps(
        self, next_request: Callable[[], Request[Key] | None] = lambda: None
    ) -> Generator[tuple[Request[Key], Step]]:
        """Yield each step with its request until no request is left; raise the error of a request that fails.

        An error ends all other answers, too, and so does closing the iterator. ``next_request`` is called whenever a
        slot is free, and the request it returns, if any, is submitted.
        """
        try:
            while True:
                if self.takes_next and (following := next_request()) is not None:
                    self.submit(following)
                if not (self._running or self._waiting or self._prefilling):
                    return
                for request, step in self.advance():
                    if isinstance(step, HdtoolError):
                        raise step
                    yield request, step
        finally:
            self.end()

    def advance(self) -> list[Outcome[Key]]:
        """Run or finish one step of all running answers, or prefill a prompt or a piece of it; return the outcomes.

        The engine is locked during the call. Raise ModelError if another thread holds its lock, or if another session
        has begun to use the cache while answers of this one were running.
        """
        if not self._engine.busy.acquire(blocking=False):
            raise ModelError("two threads use one model at once: let them take turns, or load the model for each")
        try:
            return self._advance()
        finally:
            self._engine.busy.release()

    def end(self) -> None:
        """End all answers and drop waiting requests. The engine waits for a launched pass before it starts another."""
        states = [*self._running, *(self._prefilling[:1] if self._prefilling else ())]
        self._launched = self._prefilling = None
        self._running.clear()
        self._waiting.clear()
        for state in states:
            state.end()
        if self._cache.user is self:
            self._cache.user = None  # no reference cycle keeps the cache's memory

    def _advance(self) -> list[Outcome[Key]]:
        if (self._running or self._prefilling) and self._cache.user is not self:
            raise ModelError(
                "another conversation began on this model before this one ended: finish one before the next, "
                "answer both by decode_batch, or load the model for each"
            )
        outcomes = self._finish(self._launched) if self._launched else []
        if self._cancelled:
            outcomes = self._drop_cancelled(outcomes)
        if not outcomes:
            outcomes = self._prefill() if self._prefills_next() else self._step()
        if self._engine.captures and self._is_full:
            # No request can start before the next step: the device computes it while the caller reads these outcomes.
            self._launched = self._launch()
        return outcomes

    def _drop_cancelled(self, outcomes: list[Outcome[Key]]) -> list[Outcome[Key]]:
        """End the cancelled requests, and return the outcomes of the others."""
        cancelled, self._cancelled = self._cancelled, set()
        self._waiting = deque(request for request in self._waiting if request not in cancelled)
        if self._prefilling and self._prefilling[0].request in cancelled:
            self._stop_prefilling()
        for slot in range(len(self._running) - 1, -1, -1):
            if self._running[slot].request in cancelled:
                self._leave(slot)
        return [outcome for outcome in outcomes if outcome[0] not in cancelled]

    def _prefills_next(self) -> bool:
        if self._running and (self._is_step_due or self._is_full):
            return False
        return bool(self._waiting or self._prefilling)

    def _prefill(self) -> list[Outcome[Key]]:
        """Prefill the next prompt or a piece of it; return its outcome, if any: a step, or the error that ends it."""
        self._is_step_due = self._in_pieces
        request = self._prefilling[0].request if self._prefilling else self._waiting.popleft()
        try:
            state, reader = self._prefilling or self._start(request)
            verified = reader.read_piece(answers_wait=bool(self._running)) if self._in_pieces else reader.read()
            state.cached_tokens = reader.cached_tokens
            return [] if verified is None else [(request, self._join(state, reader.slot, verified))]
        except HdtoolError as error:
            self._stop_prefilling()
            return [(request, error)]

    def _start(self, request: Request[Key]) -> tuple[SequenceState[Key], PromptReader]:
        self._engine.notice_changes()
        state = SequenceState(self._engine, request, self._max_new_tokens, self._stops)
        room = state.room if len(self._cache.slots) == 1 else min(state.room, RESERVED_POSITIONS)
        reader = PromptReader(self._engine, self._cache, len(self._running), request.prompt, room, request.owner)
        self._prefilling = state, reader
        state.begin()
        self._cache.user = self
        reader.begin(self._prefixes)
        return self._prefilling

    def _join(self, state: SequenceState[Key], read_into: int, verified: Verified) -> Step | HdtoolError:
        """Return the first step after a prefilled prompt, or an error; if the answer goes on, it takes a slot."""
        slot = len(self._running)
        if read_into != slot:  # answers have ended since the prefill began
            self._overwrite(slot, by=read_into)
        outcome = self._conclude(slot, state, verified)
        if _has_ended(outcome):
            self._stop_prefilling()
        else:
            self._prefilling = None
            self._running.append(state)
        return outcome

    def _stop_prefilling(self) -> None:
        if self._prefilling:
            state, _ = self._prefilling
            self._prefilling = None
            state.end()

    def _step(self) -> list[Outcome[Key]]:
        self._is_step_due = False
        return self._finish(self._launch()) if self._running else []

    def _launch(self) -> WaitForResults:
        """Draft for all answers, and start the pass that verifies the trees; return a function that waits for it."""
        trees = self._fit_trees(draft_trees(self._running))
        return self._engine.launch(self._cache, trees, [state.options for state in self._running])

    def _fit_trees(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Return the part of each tree that the engine can verify: all of it unless the engine only verifies chains."""
        if self._engine.takes_trees:
            return trees
        fitted = [self._engine.fit_tree(self._cache, slot, tree) for slot, tree in enumerate(trees)]
        for state, tree in zip(self._running, fitted, strict=True):
            state.tree = tree
        return fitted

    def _finish(self, launched: WaitForResults) -> list[Outcome[Key]]:
        """Wait for the launched pass, accept tokens and free the slots of answers that end; return the outcomes."""
        results, self._launched = launched(), None
        outcomes: list[Outcome[Key]] = [
            (state.request, self._conclude(slot, state, verified))
            for slot, (state, verified) in enumerate(zip(self._running, results, strict=True))
        ]
        for slot in range(len(outcomes) - 1, -1, -1):
            if _has_ended(outcomes[slot][1]):
                self._leave(slot)
        return outcomes

    def _conclude(self, slot: int, state: SequenceState[Key], verified: Verified) -> Step | HdtoolError:
        try:
            accepted = state.accept(verified)
            if accepted is None:
                verified = self._engine.recompute(self._cache, slot, state.tree.root)
                accepted = state.accept(verified)
                assert accepted is not None
        except HdtoolError as error:  # an error in one request must not end the others
            return error
        self._engine.commit(self._cache, slot, accepted.path)
        return state.observe(accepted, verified)

    def _leave(self, slot: int) -> None:
        """End the answer in a slot and move the last answer into this slot."""
        self._running[slot].end()
        last = self._running.pop()
        if slot < len(self._running):
            self._overwrite(slot, by=len(self._running))
            self._running[slot] = last

    def _overwrite(self, slot: int, *, by: int) -> None:
        """Move the context of slot ``by`` to ``slot``, or swap both if a prefix cache may need the one in ``slot``."""
        if self._prefixes and is_worth_keeping(self._cache.slots[slot]):
            self._cache.swap(slot, by)
        else:
            self._cache.copy(by, to=slot)


def _has_ended(outcome: Step | HdtoolError) -> bool:
    return isinstance(outcome, HdtoolError) or outcome.finish is not None


def decode(
    engine: Engine[Any],
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    drafter: Drafter | None = None,
    prediction: Sequence[int] = (),
    prefix_caching: bool = True,
) -> Generator[Step]:
    """Generate the answer to a prompt and yield each step; only the last step has ``finish`` set.

    ``prediction`` holds tokens that the answer will probably contain: the drafter drafts from them, and they
    are not part of the context. With ``prefix_caching``, the prefix that the prompt shares with the last conversation
    is not prefilled again.
    """
    request = Request(None, prompt, sampler, drafter or NoDraft(), stops, prediction, max_new_tokens)
    return decode_request(engine, request, prefix_caching=prefix_caching)


def decode_request(engine: Engine[Any], request: Request[Key], *, prefix_caching: bool = True) -> Generator[Step]:
    """Generate the answer to a request, which must set ``max_new_tokens``; yield each step, as ``decode`` does."""
    session = Session[Key](engine, engine.cache, prefixes=PrefixCache() if prefix_caching else None)
    session.submit(request)
    return (step for _, step in session.steps())


def decode_batch(
    engine: Engine[Any],
    next_request: Callable[[], Request[Key] | None],
    size: int,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    prefix_caching: bool = False,
) -> Generator[tuple[Request[Key], Step]]:
    """Answer requests in ``size`` batch slots with continuous batching, and yield each step with its request.

    ``next_request`` is called whenever a slot is free, so a request may depend on earlier answers. If it returns
    None, it is called again after the next step, or decoding ends if no request is running. With ``prefix_caching``,
    a prefix that several prompts share is prefilled once.
    """
    prefixes = PrefixCache() if prefix_caching else None
    session = Session[Key](engine, engine.allocate(size), max_new_tokens=max_new_tokens, stops=stops, prefixes=prefixes)
    return session.steps(next_request)
