"""Base classes of trained drafters, the queue of accepted tokens that they read, and drafting by blocks or by paths."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hdtool.runtime.budget.trained_drafter_gate import MIN_TRIAL_STEPS, TrainedDrafterGate
from hdtool.runtime.caches.slots import select_rows
from hdtool.runtime.config.draft_sources import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Ranked, Verified
from hdtool.runtime.drafters.trained.proposal import (
    NO_RANKING_AFTER,
    TOKENS_PER_RANKING,
    Calibration,
    Proposal,
    prob_bucket,
)
from hdtool.runtime.kernels.compiled import Array

NO_HIDDEN = torch.empty((0, 0))
"""Placeholder for hidden states that the drafter does not read."""
LONG_PAUSE = 32
"""Number of steps without a pass after which a drafter reads only the last tokens."""
READ_AFTER_PAUSE = 128
"""Number of last tokens that a drafter reads after a long pause."""
EXPECTED_PASSES, ROWS_IN_TIME_OF_ONE = 3, 8
"""Expected number of passes per draft, and of tokens that a pass reads in the time of a pass over one token; both only
serve to estimate what the first trial of a drafter costs."""


class QueuedTokens(NamedTuple):
    """Accepted tokens, and the hidden states ``[tokens, width]`` from which they were chosen."""

    hidden: torch.Tensor
    tokens: list[int]
    skipped: int
    """Number of tokens that were skipped before ``tokens`` after a long pause; otherwise 0."""


class AcceptedTokens:
    """Queues accepted tokens and their hidden states until the drafter runs.

    Each token is paired with the hidden state that it was chosen from, which is that of the token before it.
    """

    def __init__(self, columns: slice | None = None) -> None:
        """``columns`` selects the hidden states to queue (see ``Target.watch_hidden``); by default, none are queued."""
        self._columns = columns
        self._queued: list[tuple[torch.Tensor, list[int]]] = []
        self._tokens = 0
        """Number of queued tokens."""
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Begin another answer; the first hidden states added must be those of its prompt."""
        self._queued.clear()
        self._tokens = 0
        self._prompt, self._is_prompt = list(prompt), True

    def add(self, accepted: Accepted, verified: Verified) -> None:
        """Queue the accepted tokens of a step."""
        hidden = NO_HIDDEN if verified.hidden is None or self._columns is None else verified.hidden[:, self._columns]
        if self._is_prompt:
            self._is_prompt = False
            return self._queue(hidden, [*self._prompt[1:], accepted.tokens[-1]])
        self._queue(hidden if hidden is NO_HIDDEN else select_rows(hidden, accepted.rows), accepted.tokens)

    def _queue(self, hidden: torch.Tensor, tokens: list[int]) -> None:
        self._queued.append((hidden, tokens))
        self._tokens += len(tokens)

    @property
    def unread(self) -> int:
        """Number of tokens that ``take`` would return."""
        return self._tokens if len(self._queued) <= LONG_PAUSE else min(self._tokens, READ_AFTER_PAUSE)

    def take(self) -> QueuedTokens:
        """Empty the queue and return its contents; after a long pause, only the last ``READ_AFTER_PAUSE`` tokens."""
        steps = len(self._queued)
        hidden = torch.cat([rows for rows, _ in self._queued]) if steps > 1 else self._queued[0][0]
        tokens = [token for _, chosen in self._queued for token in chosen]
        self._queued.clear()
        self._tokens = 0
        if steps <= LONG_PAUSE or len(tokens) <= READ_AFTER_PAUSE:
            return QueuedTokens(hidden, tokens, 0)
        return QueuedTokens(hidden[-READ_AFTER_PAUSE:], tokens[-READ_AFTER_PAUSE:], len(tokens) - READ_AFTER_PAUSE)


ROWS_PER_PASS = 4
"""Maximum number of paths that one pass extends."""
MAX_PASSES = 12
"""Maximum number of passes per draft, not counting the first, which reads the accepted tokens."""
MAX_CALIBRATED_DEPTH = 7
"""Depth from which on all rankings share one calibration, if there are no ``odds``."""

NO_RANKING: Ranked = np.full((1, 2), NO_RANKING_AFTER), np.zeros((1, 2))
"""Ranking of a single row whose next tokens are unknown, also as ``Proposal.in_tree`` reads it."""


class ReadingModule(Protocol):
    """Reads accepted tokens and ranks the tokens that may follow."""

    def begin(self, prompt: list[int]) -> None:
        """Discard everything read so far and begin another answer."""
        ...

    def skip(self, tokens: int) -> None:
        """Continue after this many accepted tokens without reading them. A module with its own KV cache clears it."""
        ...

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        """Read accepted tokens, each with the hidden state before it, and rank the tokens that may follow the last one.

        The first token of the prompt has no hidden state before it and is left out.
        """
        ...


Follow = Callable[[Verified], None]
"""Called after each step with the result of the target's pass."""


class TrainedProposer:
    """A drafter that was trained for its target; it drafts alone or as one of the sources of a tree.

    Its module reads accepted tokens, and the drafter learns how often the module's tokens are accepted.
    """

    starts_before_learning = False
    """True if ``begin_draft`` starts a pass that runs while the host learns from the last step."""

    def __init__(
        self,
        module: ReadingModule,
        calibration: Calibration,
        columns: slice | None,
        source: SourceId,
        gate: TrainedDrafterGate | None = None,
        relative_cost: float = 0.0,
        follow: Follow | None = None,
    ) -> None:
        """``columns`` selects the hidden states to read; see ``Target.watch_hidden``. ``follow`` is called after steps.

        With a ``gate``, the drafter runs only while it saves time; by default, it runs in every step. ``relative_cost``
        is the expected cost of a drafter's pass in passes of the target; a higher one delays the first trial.
        """
        self.seconds = 0.0
        """Seconds spent in passes of the drafter."""
        self.source = source
        """The source to which drafted nodes are attributed."""
        self.calibration, self._reader, self._gate, self._relative_cost = calibration, module, gate, relative_cost
        self._began: float | None = None
        """Time at which the current draft began; None if there is no draft, or once its outcome was observed."""
        self._follow = follow
        self._runs = False
        """True if the drafter takes part in the current draft."""
        self._accepted = AcceptedTokens(columns)
        self._proposed: Proposal | None = None
        """The proposal to compare with the next accepted tokens."""
        self._buckets = np.zeros((0, 0), np.int64)
        """Probability bucket of each of the proposal's tokens."""

    def begin(self, prompt: list[int]) -> None:
        """Begin the answer to ``prompt``, which the target must prefill next."""
        self._accepted.begin(prompt)
        self._reader.begin(prompt)
        self._proposed = self._began = None

    def begin_draft(self) -> bool:
        """Begin a step that drafts; return True if this drafter should run."""
        first_passes = MIN_TRIAL_STEPS * EXPECTED_PASSES + self._accepted.unread / ROWS_IN_TIME_OF_ONE
        self._runs = self._gate is None or self._gate.may_run(self._relative_cost * first_passes)
        self._began = time.perf_counter()
        return self._runs

    def propose(self, max_nodes: int) -> Proposal:
        """Read the queued tokens and rank the tokens that may follow, for a tree of at most ``max_nodes`` nodes."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Learn from a step, and queue the accepted tokens with the target's hidden states along their path."""
        if self._gate and self._began is not None:
            self._gate.observe(len(accepted.tokens), time.perf_counter() - self._began, self._runs)
        proposed, self._proposed, self._began = self._proposed, None, None
        if proposed is not None:
            self.calibration.learn(proposed, self._buckets, accepted.tokens)
        self._accepted.add(accepted, verified)
        if self._follow:
            self._follow(verified)

    def _take(self) -> tuple[torch.Tensor, list[int]]:
        """Empty the queue; return the hidden states and tokens to read next. Make the module skip tokens left out."""
        hidden, tokens, skipped = self._accepted.take()
        if skipped:
            self._reader.skip(skipped)
        return hidden, tokens


class BlockModule(ReadingModule, Protocol):
    """A reading module that computes while the host does other work."""

    def start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        """Start to read accepted tokens; return a function that waits for what ``read`` returns."""
        ...


class BlockDrafter(TrainedProposer):
    """Drafts several tokens in one pass, which makes a fixed number of rankings."""

    starts_before_learning = True

    def __init__(
        self,
        module: BlockModule,
        calibration: Calibration,
        columns: slice | None,
        *,
        source: SourceId = SourceId.HEADS,
        gate: TrainedDrafterGate | None = None,
        follow: Follow | None = None,
        arrange: Callable[[Array, Array], Proposal] = Proposal.in_parallel,
    ) -> None:
        """``arrange`` makes a proposal of the module's rankings."""
        super().__init__(module, calibration, columns, source, gate, follow=follow)
        self._module, self._arrange = module, arrange
        self._results: Callable[[], Ranked]
        """Waits for the pass that ``begin_draft`` started."""
        self.tokens = np.empty((0, 0), np.int64)
        """Best tokens of each ranking, ``[rankings, best]``."""
        self.probs = np.empty((0, 0))
        """Probability of each token in ``tokens``, given that the path before it is accepted."""

    @torch.inference_mode()
    def begin_draft(self) -> bool:
        """Begin a step that drafts; if this drafter should run, start the pass for ``propose`` and return True."""
        if runs := super().begin_draft():
            started = time.perf_counter()
            self._results = self._module.start(*self._take())
            self.seconds += time.perf_counter() - started
        return runs

    def propose(self, max_nodes: int) -> Proposal:
        """Rank the tokens that may follow those that were queued; update ``tokens`` and ``probs``."""
        started = time.perf_counter()
        proposal = self._arrange(*self._results())
        self._buckets = prob_bucket(proposal.probs)
        probs = self.calibration(proposal.depths[:, None], self._buckets)
        self.tokens, self.probs = proposal.tokens, np.where(proposal.tokens == NO_RANKING_AFTER, 0.0, probs)
        self.seconds += time.perf_counter() - started
        self._proposed = proposal._replace(probs=self.probs)
        return self._proposed


class SequentialModule(ReadingModule, Protocol):
    """Ranks the tokens that may follow a draft path, given its last token and the hidden state before that token."""

    @property
    def passes(self) -> int:
        """Maximum number of passes that the module can run per draft, not counting the first."""
        ...

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        """For each ``i``, extend the path of row ``parents[i]`` by ``tokens[i]``, and rank the tokens that may follow.

        Row 0 is the last token read; ``extend`` numbers its rows consecutively after it. All rows of one call are at
        the same depth.
        """
        ...


class SequentialDrafter(TrainedProposer):
    """Drafts with a sequential module: each pass after the first extends the best paths of the previous pass.

    With a gate, a draft ends where another pass would no longer increase throughput.
    """

    def __init__(
        self,
        module: SequentialModule,
        *,
        columns: slice | None = None,
        source: SourceId = SourceId.HEADS,
        gate: TrainedDrafterGate | None = None,
        relative_cost: float = 0.0,
        follow: Follow | None = None,
        odds: list[list[float]] | None = None,
        width: int = ROWS_PER_PASS,
    ) -> None:
        """``columns`` selects the hidden states to read; see ``Target.watch_hidden``.

        ``odds`` are acceptance rates by depth and probability bucket (see ``Calibration``); rankings at greater depths
        use the last depth's rates. ``width`` is the maximum number of paths that one pass extends.
        """
        super().__init__(
            module, Calibration(odds, MAX_CALIBRATED_DEPTH + 1), columns, source, gate, relative_cost, follow
        )
        self.module, self._width = module, width
        self._passes = min(module.passes, MAX_PASSES)
        rankings = 1 + width * self._passes
        self._tokens, self._after = np.zeros((2, rankings, TOKENS_PER_RANKING), np.int64)
        self._probs, self._buckets = (
            np.zeros((rankings, TOKENS_PER_RANKING)),
            np.zeros((rankings, TOKENS_PER_RANKING), np.int64),
        )
        self._depths, self._path_probs = np.zeros(rankings, np.int64), np.zeros(rankings)

    @torch.inference_mode()
    def propose(self, max_nodes: int) -> Proposal:
        started = time.perf_counter()
        hidden, tokens = self._take()
        rows = self._store_rankings(self._reader.read(hidden, tokens), 0, 0, 1.0)
        self._spent(started, len(tokens))
        first = 0
        for depth in range(1, min(self._passes, max_nodes - 1) + 1):
            chosen = self._choose_extensions(first, rows, max_nodes)
            if not len(chosen):
                break
            began = time.perf_counter()
            parents, ranks = np.divmod(chosen, TOKENS_PER_RANKING)
            parents += first
            first = rows
            ranked = self.module.extend(parents.tolist(), self._tokens[parents, ranks].tolist())
            self._after[parents, ranks] = np.arange(rows, rows + len(chosen))
            before = self._path_probs[parents] * self._probs[parents, ranks]
            rows = self._store_rankings(ranked, rows, depth, before)
            self._spent(began, len(chosen))
        tokens_of, probs, after = (part[:rows] for part in (self._tokens, self._probs, self._after))
        self._proposed = Proposal(tokens_of, probs, after, np.full(rows, NO_RANKING_AFTER), self._depths[:rows])
        return self._proposed

    def _store_rankings(self, ranked: Ranked, first: int, depth: int, path_probs: Array | float) -> int:
        """Store rankings in consecutive rows, starting with row ``first``; return the index of the next free row."""
        tokens, probs = ranked
        rows, best = first + len(tokens), tokens.shape[1]
        self._tokens[first:rows], self._probs[first:rows], self._after[first:rows] = (
            NO_RANKING_AFTER,
            0,
            NO_RANKING_AFTER,
        )
        buckets = prob_bucket(probs)
        self._buckets[first:rows, :best], self._tokens[first:rows, :best] = buckets, tokens
        self._probs[first:rows, :best] = np.where(tokens == NO_RANKING_AFTER, 0.0, self.calibration(depth, buckets))
        self._depths[first:rows], self._path_probs[first:rows] = depth, path_probs
        return rows

    def _choose_extensions(self, first: int, rows: int, max_nodes: int) -> Array:
        """Choose which of the tokens ranked in rows ``first`` to ``rows - 1`` to extend, at most ``width``.

        Return the flat indices of the chosen tokens in these rankings, best first. A token outside of the ``max_nodes``
        best nodes so far is not extended: its continuations are even less probable. A gate may choose fewer.
        """
        nodes = (self._path_probs[:rows, None] * self._probs[:rows]).ravel()
        bar = np.partition(nodes, -max_nodes)[-max_nodes] if len(nodes) > max_nodes else 0.0
        paths = nodes[first * TOKENS_PER_RANKING :]
        best = np.argsort(-paths, kind="stable")[: self._width]
        best = best[(paths[best] > 0) & (paths[best] >= bar)]
        certainty = float(self._probs[first:rows, 0].mean())
        return best[: self._gate.paths_to_extend(paths[best], certainty)] if self._gate else best

    def _spent(self, began: float, rows: int) -> None:
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if self._gate:
            self._gate.note_pass(rows, seconds)
