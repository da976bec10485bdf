"""The state of an answer between forward passes of the engine, and drafting for several answers at once."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Generic

from hdtool.runtime.core.accept import Accepted, accept
from hdtool.runtime.core.drafter import draft_many
from hdtool.runtime.core.engine_interface import Engine, PassOptions, Verified
from hdtool.runtime.core.race_leaders import compile_race_walks
from hdtool.runtime.core.request import Key, Request, room_for
from hdtool.runtime.core.step import Finish, Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.core.tree_walks import compile_ranked_walks


class SequenceState(Generic[Key]):
    """The state of one answer between two forward passes of the engine."""

    def __init__(self, engine: Engine[Any], request: Request[Key], max_new_tokens: int, stops: Container[int]) -> None:
        """``max_new_tokens`` and ``stops`` apply if the request has none of its own."""
        self.request, self._sampler, self.drafter = request, request.sampler, request.drafter
        prompt, sampler, shortcuts = request.prompt, request.sampler, request.sampler.shortcuts
        limit = max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        self.room, self._finish_at_limit = room_for(engine, prompt, limit)
        """Number of tokens that may still be generated."""
        self._stops = request.stops or stops
        are_logits_read = self.drafter.reads_logits or request.observer is not None
        self.options = PassOptions(shortcuts.chooses_by_argmax, are_logits_read, self.drafter.max_ranked)
        if engine.captures:  # without capture, the host reads the logits directly
            num_ranked = max(self.options.max_ranked, shortcuts.max_ranked)
            self.options = self.options._replace(
                max_ranked=num_ranked, root=shortcuts.draws_by_row, draws=shortcuts.races
            )
            if shortcuts.draws and shortcuts.max_ranked:
                compile_ranked_walks(shortcuts.draws, sampler.walk_buffer)
            if shortcuts.races:
                compile_race_walks(shortcuts.races, sampler.walk_buffer)
        self._needs_all_logits = not shortcuts.takes_the_only_token or self.options.wants_maxima
        self.tree = DraftTree.bare(prompt[-1])
        """Tree that is verified in the current step."""
        self.cached_tokens = 0
        """Number of prompt tokens that were already cached; 0 after the first step."""
        self._started = self._draft_seconds = self._seconds_in_model = 0.0
        self._engine, self._vocabulary = engine, engine.vocabulary

    @property
    def context(self) -> list[int]:
        """Prompt and all tokens emitted since."""
        return self._sampler.context

    def begin(self) -> None:
        """Start the drafter and the first step, which prefills the prompt, has no drafts and emits one token."""
        self.start_step(time.perf_counter())
        self.drafter.set_seed(self._sampler.seed)
        self.drafter.begin(self.request.prompt)
        if len(self.request.prediction):
            self.drafter.predict(self.request.prediction)
        self._draft_seconds = time.perf_counter() - self._started

    def set_draft(self, tree: DraftTree, seconds: float) -> DraftTree:
        """Record this step's draft tree and how long drafting took; return the part of the tree to verify."""
        if len(tree.tokens):
            # Deeper nodes are past the answer's end, and a tokenizer may have more ids than the model has embeddings.
            tree = tree.within(self.room - 1, self._vocabulary)
        if self._needs_all_logits and tree.forced_tokens is not None:
            tree = replace(tree, forced_tokens=None)
        self.tree, self._draft_seconds = tree, seconds
        return tree

    def start_step(self, now: float) -> None:
        self._seconds_in_model, self._started = self._engine.log.seconds, now

    def end(self) -> None:
        """End the answer, whether or not it is complete."""
        self.drafter.end()

    def accept(self, verified: Verified) -> Accepted | None:
        """Choose the tokens to emit; return None if the pass overflowed because of its drafts, which are dropped."""
        accepted = accept(self.tree, verified, self._sampler, stops=self._stops, max_tokens=self.room)
        if accepted is None:
            self.tree = DraftTree.bare(self.tree.root)
        elif self._sampler.overflowed:
            self._engine.note_overflow()
        return accepted

    def observe(self, accepted: Accepted, verified: Verified) -> Step:
        if self.request.observer:
            self.request.observer(accepted, verified)
        self.drafter.observe(accepted, verified)
        self.room -= len(accepted.tokens)
        finish = Finish.STOP if accepted.stopped else self._finish_at_limit if not self.room else None
        cached, self.cached_tokens = self.cached_tokens, 0
        return Step(
            accepted.tokens,
            self.tree,
            accepted.path,
            self._draft_seconds,
            self._engine.log.seconds - self._seconds_in_model,
            time.perf_counter() - self._started,
            finish,
            cached,
        )


def draft_trees(sequences: Sequence[SequenceState[Any]]) -> list[DraftTree]:
    """Begin a step for each sequence and draft its tree; return the trees to verify."""
    started = time.perf_counter()
    for sequence in sequences:
        sequence.start_step(started)
    trees = draft_many([sequence.drafter for sequence in sequences], [sequence.context for sequence in sequences])
    seconds = (time.perf_counter() - started) / len(sequences)
    return [sequence.set_draft(tree, seconds) for sequence, tree in zip(sequences, trees, strict=True)]
