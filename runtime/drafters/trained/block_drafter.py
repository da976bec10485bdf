"""Drafts several tokens in one run of a module, which computes while the host does other work."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.drafters.trained.draft_module import DraftModule
from hdtool.runtime.drafters.trained.proposal import NO_RANKING_AFTER, Calibration, Proposal, prob_bucket
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.settings.draft_sources import SourceId


class BlockDrafter(TrainedProposer):
    """Drafts several tokens from the rankings that one run of a module makes."""

    starts_before_learning = True

    def __init__(
        self,
        module: DraftModule,
        calibration: Calibration,
        columns: slice | None,
        *,
        source: SourceId = SourceId.HEADS,
        gate: TrainedDrafterGate | None = None,
        arrange: Callable[[Array, Array], Proposal] = Proposal.in_parallel,
    ) -> None:
        """``arrange`` makes a proposal from the module's rankings, given as ``(tokens, probs)``."""
        super().__init__(module, calibration, columns, source, gate)
        self._arrange = arrange
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
            self._results = self._start(*self._take())
            self.seconds += time.perf_counter() - started
        return runs

    def _start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        return self.module.start(hidden, tokens)

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
