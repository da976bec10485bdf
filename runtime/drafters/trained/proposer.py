"""The base class of trained drafters: when to run, what to read, and what to learn from each step."""

from __future__ import annotations

import time

import numpy as np
import torch

from hdtool.runtime.budget.trained_drafter_gate import MIN_TRIAL_STEPS, TrainedDrafterGate
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.trained.accepted_tokens import AcceptedTokens
from hdtool.runtime.drafters.trained.draft_module import DraftModule
from hdtool.runtime.drafters.trained.proposal import Calibration, Proposal
from hdtool.runtime.settings.draft_sources import SourceId

EXPECTED_PASSES, ROWS_IN_TIME_OF_ONE = 3, 8
"""Expected number of passes per draft, and of tokens that a pass reads in the time of a pass over one token; both only
serve to estimate what the first trial of a drafter costs."""


class TrainedProposer:
    """A drafter that runs a trained module or a draft model, alone or as one of the sources of a tree.

    The module reads accepted tokens, and the drafter learns how often the module's tokens are accepted.
    """

    starts_before_learning = False
    """True if ``begin_draft`` starts a pass that runs while the host learns from the last step."""

    def __init__(
        self,
        module: DraftModule,
        calibration: Calibration,
        columns: slice | None,
        source: SourceId,
        gate: TrainedDrafterGate | None = None,
    ) -> None:
        """``columns`` selects the hidden states to read; see ``Target.watch_hidden``.

        With a ``gate``, the drafter runs only while it saves time; by default, it runs in every step.
        """
        self.seconds = 0.0
        """Seconds spent in passes of the drafter."""
        self.source = source
        """The source to which drafted nodes are attributed."""
        self.module, self.calibration, self._gate = module, calibration, gate
        self._began: float | None = None
        """Time at which the current draft began; None if there is no draft, or once its outcome was observed."""
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
        self.module.begin(prompt)
        self._proposed = self._began = None

    def begin_draft(self) -> bool:
        """Begin a step that drafts; return True if this drafter should run."""
        first_passes = MIN_TRIAL_STEPS * EXPECTED_PASSES + self._accepted.unread / ROWS_IN_TIME_OF_ONE
        self._runs = self._gate is None or self._gate.may_run(self.module.relative_cost * first_passes)
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
        self.module.follow(verified)

    def _take(self) -> tuple[torch.Tensor, list[int]]:
        """Empty the queue; return the hidden states and tokens to read next. Make the module skip tokens left out."""
        hidden, tokens, skipped = self._accepted.take()
        if skipped:
            self.module.skip(skipped)
        return hidden, tokens
