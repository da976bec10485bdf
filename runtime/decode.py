"""The loop that the whole program exists for: draft, verify, accept, keep, observe."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hdtool.data.errors import PromptError
from hdtool.runtime.accept import accept
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.sources import SourceName
from hdtool.runtime.target import Target
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


def decode(
    target: Target,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    drafter: Drafter | None = None,
) -> Iterator[Step]:
    """Answer a prompt, one step after another.

    The first step is the prompt's own forward pass; it has no drafts and brings one token.
    """
    drafter = drafter or NoDraft()
    room, at_the_end = room_for(target, prompt, max_new_tokens)
    clock = _Clock(target)
    tree = DraftTree.bare(prompt[-1])
    drafter.begin(prompt)
    clock.drafted()
    logits = target.prefill(prompt, room)
    while True:
        accepted = accept(tree, logits, sampler, stops=stops, most=room)
        target.keep(accepted.path)
        drafter.observe(accepted, logits)
        room -= len(accepted.tokens)
        finish = Finish.STOP if accepted.stopped else at_the_end if not room else None
        yield Step(accepted.tokens, tree, accepted.path, *clock.lap(), finish)
        if finish:
            return
        clock.start()
        # A node deeper than this could only be accepted past the end.
        tree = drafter.draft(sampler.context).clipped(room - 1)
        clock.drafted()
        logits = target.verify(tree)


def room_for(target: Target, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, Finish]:
    """How many tokens may follow the prompt, and what it means to have said them all."""
    limit = target.context_limit(len(prompt))
    if limit is None or len(prompt) + max_new_tokens <= limit:
        return max_new_tokens, Finish.LENGTH
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt is {len(prompt):,} tokens long, but the model's context holds {limit:,}, answer included: "
            "shorten it, or take a model with a longer context"
        )
    return limit - len(prompt), Finish.CONTEXT


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
