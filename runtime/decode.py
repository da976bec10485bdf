"""The loop that the whole program exists for: draft, verify, accept, keep, observe."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from hdtool.data.errors import PromptError
from hdtool.runtime.accept import Accepted, accept
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import DraftTree


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model said that it is done."""
    LENGTH = "length"
    """As many tokens as were asked for."""
    CONTEXT = "context"
    """The model's context is full."""
    INTERRUPT = "interrupt"
    """The user had enough."""


@dataclass(frozen=True)
class Step:
    """What one forward pass of the target brought."""

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    draft_seconds: float
    verify_seconds: float
    """Inside the model's own forward pass."""
    seconds: float
    """The whole step."""
    finish: Finish | None = None

    @property
    def sources(self) -> list[SourceName]:
        """Where each of the tokens was drafted; the one more came from nowhere."""
        return [*(SourceName(source) for source in self.tree.sources[self.path].tolist()), SourceName.NONE]


class DecodeState:
    """One answer while it is made: what is decided between two passes of the target."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_new_tokens: int,
        stops: Container[int] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self.prompt = prompt
        self.room, self._at_the_end = room_for(target, prompt, max_new_tokens)
        self._sampler, self._stops, self._drafter = sampler, stops, drafter or NoDraft()
        self._tree = DraftTree.bare(prompt[-1])
        self._clock = _Clock(target)
        self._target, self._vocabulary = target, target.vocabulary

    def begin(self) -> Sequence[int]:
        """The prompt, which is the first step: it has no drafts and brings one token."""
        self._clock.start()
        self._drafter.begin(self.prompt)
        self._clock.drafted()
        return self.prompt

    def draft(self) -> DraftTree:
        self._clock.start()
        # A node deeper than this could only be accepted past the end.
        drafted = self._drafter.draft(self._sampler.context).clipped(self.room - 1)
        # A tokenizer may have more ids than the model has embeddings.
        self._tree = drafted.embeddable(self._vocabulary)
        self._clock.drafted()
        return self._tree

    def accept(self, logits: torch.Tensor, recompute: Callable[[int], torch.Tensor]) -> tuple[Accepted, torch.Tensor]:
        """What is accepted, and the logits that it was accepted by.

        ``recompute`` verifies the root again without drafts; it is called if a pass with drafts overflowed.
        """
        accepted = self._accepted(logits)
        if accepted is None:
            self._tree = DraftTree.bare(self._tree.root)
            logits = recompute(self._tree.root)
            accepted = self._accepted(logits)
            assert accepted is not None
        if self._sampler.overflowed:
            self._target.note_overflow()
        return accepted, logits

    def _accepted(self, logits: torch.Tensor) -> Accepted | None:
        return accept(self._tree, logits, self._sampler, stops=self._stops, most=self.room)

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> Step:
        self._drafter.observe(accepted, logits)
        self.room -= len(accepted.tokens)
        finish = Finish.STOP if accepted.stopped else self._at_the_end if not self.room else None
        return Step(accepted.tokens, self._tree, accepted.path, *self._clock.lap(), finish)


def decode(
    target: Target,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    drafter: Drafter | None = None,
) -> Iterator[Step]:
    """Answer a prompt, one step after another."""
    turn = DecodeState(target, prompt, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter)
    begins = True
    while True:
        with target.held_by(turn, begins=begins):
            logits = target.prefill(turn.begin(), turn.room) if begins else target.verify(turn.draft())
            accepted, logits = turn.accept(logits, target.recompute)
            target.commit(accepted.path)
            step = turn.observe(accepted, logits)
        yield step
        if step.finish:
            return
        begins = False


def room_for(target: Target, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, Finish]:
    """How many tokens may follow the prompt, and what it means to have said them all."""
    _check_prompt(prompt, target.vocabulary)
    limit = target.context_limit(len(prompt))
    if limit is None or len(prompt) + max_new_tokens <= limit:
        return max_new_tokens, Finish.LENGTH
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt is {len(prompt):,} tokens long, but the model's context holds {limit:,}, answer included: "
            "shorten it, or take a model with a longer context"
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


class _Clock:
    """Splits the time of a step; time that the consumer takes between steps is not counted."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.start()

    def start(self) -> None:
        self._in_model = self._target.seconds_in_model
        self._started = self._draft_end = time.perf_counter()

    def drafted(self) -> None:
        self._draft_end = time.perf_counter()

    def lap(self) -> tuple[float, float, float]:
        """Seconds drafting, in the model, and in all."""
        whole = time.perf_counter() - self._started
        return self._draft_end - self._started, self._target.seconds_in_model - self._in_model, whole
