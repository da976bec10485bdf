"""The decoding loop: draft, verify, accept, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch

from hdtool.data.errors import ContextError, PromptError
from hdtool.runtime.accept import Accepted, accept
from hdtool.runtime.drafter import Drafter, HistoryDrafter, NoDraft, SeededDrafter, reads_logits
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import DraftTree


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model produced a token that ends the answer."""
    LENGTH = "length"
    """The answer has ``max_new_tokens`` tokens."""
    CONTEXT = "context"
    """The model's context is full."""
    INTERRUPT = "interrupt"
    """The user interrupted the answer."""


class Step(NamedTuple):
    """The tokens of one forward pass of the target, and how long it took."""

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    draft_seconds: float
    verify_seconds: float
    """Inside the model's own forward pass."""
    seconds: float
    """The whole step; on a device that computes by itself, with what its consumer does meanwhile."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache; in the first step."""

    @property
    def sources(self) -> list[SourceName]:
        """The source of each token; ``NONE`` for the bonus token."""
        return [*(SourceName(source) for source in self.tree.sources[self.path].tolist()), SourceName.NONE]


class DecodeState:
    """The state of one answer between two forward passes of the target."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_new_tokens: int,
        stops: Container[int] = (),
        drafter: Drafter | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        self.prompt = prompt
        self._prediction = prediction
        self.room, self._finish_at_limit = room_for(target, prompt, max_new_tokens)
        self._sampler, self._stops, self.drafter = sampler, stops, drafter or NoDraft()
        self.walks = sampler.walks
        """Whether acceptance begins with a walk by arg-max."""
        self.ranks = reads_logits(self.drafter)
        """Whether the drafter may rank the tokens after each node."""
        self._needs_all_logits = not sampler.takes_the_only_token or self.ranks
        self._tree = DraftTree.bare(prompt[-1])
        self._is_first = True
        self._started = self._draft_seconds = self._seconds_in_model = 0.0
        self._target, self._vocabulary = target, target.vocabulary
        self._changes = target.changes

    @property
    def has_current_model(self) -> bool:
        """Whether no change of the model was noticed since the answer began."""
        return self._changes == self._target.changes

    @property
    def context(self) -> list[int]:
        """The prompt and all tokens since."""
        return self._sampler.context

    def begin(self) -> Sequence[int]:
        """Start the first step, which prefills the prompt: it has no drafts and yields one token."""
        self.start_step()
        if isinstance(self.drafter, SeededDrafter):
            self.drafter.set_seed(self._sampler.seed)
        self.drafter.begin(self.prompt)
        if len(self._prediction) and isinstance(self.drafter, HistoryDrafter):
            self.drafter.predict(self._prediction)
        self._draft_seconds = time.perf_counter() - self._started
        return self.prompt

    def draft(self) -> DraftTree:
        self.start_step()
        tree = self.drafter.draft(self._sampler.context)
        return self.take(tree, time.perf_counter() - self._started)

    def take(self, tree: DraftTree, seconds: float) -> DraftTree:
        """The tree of this step, of what was drafted in so many seconds."""
        if len(tree.tokens):
            # Deeper nodes would be accepted past the end, and a tokenizer may have more ids than the model embeddings.
            tree = tree.within(self.room - 1, self._vocabulary)
        if self._needs_all_logits and tree.certain is not None:
            tree = replace(tree, certain=None)
        self._tree, self._draft_seconds = tree, seconds
        return tree

    def start_step(self) -> None:
        self._seconds_in_model, self._started = self._target.seconds_in_model, time.perf_counter()

    def end(self) -> None:
        """End the answer, complete or not."""
        if isinstance(self.drafter, HistoryDrafter):
            self.drafter.end()

    def accept(self, logits: torch.Tensor, recompute: Callable[[int], torch.Tensor]) -> tuple[Accepted, torch.Tensor]:
        """Wait for the logits; the accepted tokens, and the logits that decided.

        ``recompute`` verifies the root again without drafts; it is called if a pass with drafts overflowed.
        """
        self._target.wait()
        accepted = accept(self._tree, logits, self._sampler, stops=self._stops, most=self.room)
        if accepted is None:
            self._tree = DraftTree.bare(self._tree.root)
            logits = recompute(self._tree.root)
            accepted = accept(self._tree, logits, self._sampler, stops=self._stops, most=self.room)
            assert accepted is not None
        if self._sampler.overflowed:
            self._target.note_overflow()
        return accepted, logits

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> Step:
        self.drafter.observe(accepted, logits)
        self.room -= len(accepted.tokens)
        finish = Finish.STOP if accepted.stopped else self._finish_at_limit if not self.room else None
        cached, self._is_first = self._target.cached_tokens if self._is_first else 0, False
        return Step(
            accepted.tokens,
            self._tree,
            accepted.path,
            self._draft_seconds,
            self._target.seconds_in_model - self._seconds_in_model,
            time.perf_counter() - self._started,
            finish,
            cached,
        )


def decode(
    target: Target,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    drafter: Drafter | None = None,
    prediction: Sequence[int] = (),
    prefix_caching: bool = True,
) -> Generator[Step]:
    """Answer a prompt, one step after another.

    A ``prediction`` is what the answer will probably look like: it is drafted from, and never read by the model. With
    ``prefix_caching``, the model does not read again what the prompt shares with the start of the last conversation.
    """
    state = DecodeState(
        target,
        prompt,
        sampler,
        max_new_tokens=max_new_tokens,
        stops=stops,
        drafter=drafter,
        prediction=prediction,
    )
    read = partial(target.prefill, reuse=prefix_caching)
    verify = partial(target.verify, wait=False, walk=state.walks, rank=state.ranks)

    def finish(logits: torch.Tensor) -> Step:
        accepted, logits = state.accept(logits, target.recompute)
        target.commit(accepted.path)
        return state.observe(accepted, logits)

    is_first = True
    late: Step | None = None  # where a device computes by itself, text of a step is made while the next one runs
    try:
        while True:
            with target.locked_for(state, is_first=is_first):
                logits = read(state.begin(), state.room) if is_first else verify(state.draft())
                step = None if late or target.captures else finish(logits)
            if step is None:
                if late:
                    yield late
                with target.locked_for(state, is_first=False):
                    step = finish(logits)
            is_first, late = False, step if target.captures and not step.finish else None
            if not late:
                yield step
            if step.finish:
                return
    finally:
        target.wait()
        state.end()


def room_for(target: Target, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, Finish]:
    """The number of tokens that may follow the prompt, and why the answer ends after them."""
    _check_prompt(prompt, target.vocabulary)
    limit = target.context_limit(len(prompt))
    if limit is None or len(prompt) + max_new_tokens <= limit:
        return max_new_tokens, Finish.LENGTH
    if len(prompt) >= limit:
        raise ContextError(
            f"the prompt is {len(prompt):,} tokens long, but the model's context holds {limit:,}, answer included",
            "shorten it, or take a model with a longer context",
        )
    return limit - len(prompt), Finish.CONTEXT


def _check_prompt(prompt: Sequence[int], vocabulary: int) -> None:
    if not len(prompt):
        raise PromptError("the prompt is empty: give at least one token")
    outside = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise PromptError(
            f"the prompt holds token {outside}, but the model has embeddings for tokens 0 to {vocabulary - 1} only: "
            "remove the text of that token, or use the tokenizer that the model was trained with"
        )
