"""Drafts pass by pass: each pass of a module extends the best paths of the pass before, as long as that pays."""

from __future__ import annotations

import time

import numpy as np
import torch

from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.drafters.trained.draft_module import MAX_PASSES, DraftModule
from hdtool.runtime.drafters.trained.proposal import (
    NO_RANKING_AFTER,
    TOKENS_PER_RANKING,
    Calibration,
    Proposal,
    prob_bucket,
)
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.settings.draft_sources import SourceId

MAX_CALIBRATED_DEPTH = 7
"""Depth from which on all rankings share one calibration, if there are no ``odds``."""


class SequentialDrafter(TrainedProposer):
    """Drafts with a sequential module: each pass after the first extends the best paths of the previous pass.

    With a gate, a draft ends where another pass would no longer increase throughput.
    """

    def __init__(
        self,
        module: DraftModule,
        *,
        columns: slice | None = None,
        source: SourceId = SourceId.HEADS,
        gate: TrainedDrafterGate | None = None,
        odds: list[list[float]] | None = None,
    ) -> None:
        """``columns`` selects the hidden states to read; see ``Target.watch_hidden``.

        ``odds`` are acceptance rates by depth and probability bucket (see ``Calibration``); rankings at greater depths
        use the last depth's rates.
        """
        super().__init__(module, Calibration(odds, MAX_CALIBRATED_DEPTH + 1), columns, source, gate)
        self._passes = min(module.passes, MAX_PASSES)
        rankings = 1 + module.paths_per_pass * self._passes
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
        rows = self._store_rankings(self.module.read(hidden, tokens), 0, 0, 1.0)
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
        """Choose which of the tokens ranked in rows ``first`` to ``rows - 1`` to extend.

        Return the flat indices of the chosen tokens in these rankings, best first. A token outside of the ``max_nodes``
        best nodes so far is not extended: its continuations are even less probable. A gate may choose fewer.
        """
        nodes = (self._path_probs[:rows, None] * self._probs[:rows]).ravel()
        bar = np.partition(nodes, -max_nodes)[-max_nodes] if len(nodes) > max_nodes else 0.0
        paths = nodes[first * TOKENS_PER_RANKING :]
        best = np.argsort(-paths, kind="stable")[: self.module.paths_per_pass]
        best = best[(paths[best] > 0) & (paths[best] >= bar)]
        certainty = float(self._probs[first:rows, 0].mean())
        return best[: self._gate.paths_to_extend(paths[best], certainty)] if self._gate else best

    def _spent(self, began: float, rows: int) -> None:
        seconds = time.perf_counter() - began
        self.seconds += seconds
        if self._gate:
            self._gate.note_pass(rows, seconds)
