"""The request for an answer, the steps that generate it, its state between two steps, and statistics over steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import ContextError, OptionError, PromptError
from hdtool.runtime.config.draft_sources import SourceId
from hdtool.runtime.core.accept import Accepted, accept
from hdtool.runtime.core.drafter import Drafter, NoDraft, draft_many
from hdtool.runtime.core.engine_interface import Engine, PassOptions, Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.core.tree_walks import compile_ranked_walks


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
    """The tokens that one forward pass of the target emitted, the tree that it verified, and how long the step took."""

    tokens: list[int]
    tree: DraftTree
    path: list[int]
    draft_seconds: float
    verify_seconds: float
    """Seconds inside the model's forward pass."""
    seconds: float
    """Seconds of the whole step; includes work of the consumer if the device computes asynchronously."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that were already in the KV cache; 0 after the first step."""

    @property
    def sources(self) -> list[SourceId]:
        """Source that drafted each emitted token; ``NONE`` for the bonus token."""
        return [*(SourceId(source) for source in self.tree.sources[self.path].tolist()), SourceId.NONE]


Key = TypeVar("Key")
Observer = Callable[[Accepted, Verified], None]
"""Called with each step's accepted path and the result of its pass, whose logits are then complete."""


@dataclass(frozen=True, eq=False)
class Request(Generic[Key]):
    """A prompt and the options for its answer."""

    key: Key
    """Value by which the caller recognizes the request in the outcomes of the session."""
    prompt: Sequence[int]
    sampler: Sampler
    drafter: Drafter = field(default_factory=NoDraft)
    """Drafter that no other request uses until this request ends."""
    stops: Container[int] = ()
    """Tokens that end this answer; if empty, the stops of the session apply."""
    prediction: Sequence[int] = ()
    """Tokens that the answer will probably contain; the drafter drafts from them, and the model never reads them."""
    max_new_tokens: int | None = None
    """Maximum number of tokens in this answer; None for the limit of the session."""
    owner: str = ""
    """Name of the tenant; cached prefixes are reused only for requests with the same owner."""
    observer: Observer | None = None


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
            self.options = self.options._replace(max_ranked=num_ranked, root=shortcuts.draws_by_row)
            if shortcuts.draws and shortcuts.max_ranked:
                compile_ranked_walks(shortcuts.draws, sampler.walk_buffer)
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


def room_for(engine: Engine[Any], prompt: Sequence[int], max_new_tokens: int) -> tuple[int, Finish]:
    """Return ``(room, finish)``: the maximum number of new tokens, and the finish reason of an answer of that length.

    Raise PromptError for an invalid prompt, its subclass ContextError if the prompt fills the context, and OptionError
    if ``max_new_tokens`` is below 1.
    """
    _check_prompt(prompt, engine.vocabulary)
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens is {max_new_tokens}, but an answer has at least one token: give 1 or more")
    limit = engine.context_limit(len(prompt))
    if limit is None or len(prompt) + max_new_tokens <= limit:
        return max_new_tokens, Finish.LENGTH
    if len(prompt) >= limit:
        raise ContextError(len(prompt), limit)
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


MAX_UNCOUNTED_STEPS = 1024


@dataclass
class Stats:
    """Statistics summed over the steps of one or more answers."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finish: Finish | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that were already in the KV cache."""
    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, len(SourceId)), np.int64))
    """``drafted``, ``accepted`` and ``hits``, one row each, ``[3, sources]``."""
    _uncounted: list[tuple[npt.NDArray[np.uint8], list[int]]] = field(default_factory=list)
    """Sources and path of each step that is not in ``_counts`` yet; counted on demand, or once there are many."""
    source_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(SourceId)))

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        self.steps += 1
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.finish = step.finish
        self.cached_tokens += step.cached_tokens
        if len(step.tree):
            self._uncounted.append((step.tree.sources, step.path))
            if len(self._uncounted) == MAX_UNCOUNTED_STEPS:
                self._count()

    def _count(self) -> npt.NDArray[np.int64]:
        for sources, path in self._uncounted:
            drafted = np.bincount(sources, minlength=len(SourceId))
            self._counts += drafted, np.bincount(sources[path], minlength=len(SourceId)), drafted > 0
        self._uncounted.clear()
        return self._counts

    @property
    def drafted(self) -> npt.NDArray[np.int64]:
        """Number of drafted nodes per source."""
        drafted: npt.NDArray[np.int64] = self._count()[0]
        return drafted

    @property
    def accepted(self) -> npt.NDArray[np.int64]:
        """Number of accepted nodes per source."""
        accepted: npt.NDArray[np.int64] = self._count()[1]
        return accepted

    @property
    def hits(self) -> npt.NDArray[np.int64]:
        """Number of steps in which each source drafted at least one node."""
        hits: npt.NDArray[np.int64] = self._count()[2]
        return hits

    def counted(self, steps: Iterable[Step], drafter: Drafter) -> Iterator[Step]:
        """Yield each step after adding it to the statistics; at the end, add the seconds that each source took."""
        add_seconds = self.timing(drafter)
        try:
            for step in steps:
                self.add(step)
                yield step
        finally:
            add_seconds()

    def timing(self, drafter: Drafter) -> Callable[[], None]:
        """Return a function that adds the seconds that a drafter has spent in each source since now."""
        before = dict(drafter.seconds)

        def add_seconds() -> None:
            for source, seconds in drafter.seconds.items():
                self.source_seconds[source] += seconds - before.get(source, 0.0)

        return add_seconds

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        whole = cls()
        for part in parts:
            whole.tokens += part.tokens
            whole.steps += part.steps
            whole.seconds += part.seconds
            whole.draft_seconds += part.draft_seconds
            whole.verify_seconds += part.verify_seconds
            whole.cached_tokens += part.cached_tokens
            whole._counts += part._count()
            whole.source_seconds += part.source_seconds
        return whole

    @property
    def sources(self) -> list[SourceId]:
        """Sources that drafted at least one node, or in which time was spent."""
        active = (source for source in sorted(SourceId) if self.drafted[source] or self.source_seconds[source])
        return [source for source in active if source]

    @property
    def that_helped(self) -> list[SourceId]:
        """Sources that drafted at least one accepted token."""
        return [source for source in self.sources if self.accepted[source]]

    def sources_json(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each source for the JSON output; the keys are public and must not change."""
        return {
            str(source): {
                "drafted": int(self.drafted[source]),
                "accepted": int(self.accepted[source]),
                "hits": int(self.hits[source]),
                "microseconds": round(float(self.source_seconds[source]) * 1e6, 1),
            }
            for source in self.sources
        }

    @property
    def accepted_prediction_tokens(self) -> int:
        """Number of accepted draft tokens from a predicted output, as OpenAI's API counts them."""
        return int(self.accepted[SourceId.PREDICTION])

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of rejected draft tokens from a predicted output; tokens rejected several times count each time."""
        return int(self.drafted[SourceId.PREDICTION]) - self.accepted_prediction_tokens

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def draft_us_per_step(self) -> float:
        return self._per_step(self.draft_seconds) * 1e6

    @property
    def verify_ms_per_step(self) -> float:
        return self._per_step(self.verify_seconds) * 1e3

    @property
    def outside_us_per_step(self) -> float:
        """Overhead per step in microseconds: the time outside the model's forward pass."""
        return self._per_step(self.seconds - self.verify_seconds) * 1e6

    def source_us_per_step(self, source: SourceId) -> float:
        return self._per_step(float(self.source_seconds[source])) * 1e6

    def _per_step(self, seconds: float) -> float:
        return seconds / self.steps if self.steps else 0.0
