"""Drafts by extending the most probable paths: pass by pass, or on the device without the host between the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hdtool.runtime.core.engine_interface import Ranked, TopTokens
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.draft_module import ROWS_PER_PASS, DraftModule
from hdtool.runtime.drafters.trained.proposal import Calibration, Proposal
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.drafters.trained.sequential_drafter import MAX_CALIBRATED_DEPTH, SequentialDrafter
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate

DEPTHS = (2, 4, 8)
"""Numbers of passes after the first that a captured draft makes."""
DEPTH_PER_TOKEN = 2
"""Passes of a draft for each token that drafts add to a step on average."""
LEARNING_RATE = 0.1
EXPECTED_TOKENS = 2.0
"""Initial average number of tokens that a step accepts."""


def rankings_for(depth: int) -> int:
    """Return the number of rankings in a tree: one after the root, and ``ROWS_PER_PASS`` at each further depth."""
    return 1 + ROWS_PER_PASS * depth


Extend = Callable[[int, torch.Tensor, torch.Tensor], TopTokens]
"""Ranks the tokens after paths at a depth, given their last tokens and the rows of the paths that they extend."""


def rank_best_paths(first: TopTokens, depth: int, extend: Extend) -> TopTokens:
    """Return the ``first`` ranking ``[1, best]``, after the root, and rankings after the most probable paths below it.

    Each depth extends the best paths of the depth before, at most ``ROWS_PER_PASS``. Rows are as ``Proposal.in_tree``
    reads them.
    """
    rankings, places, ranked = [first], [torch.zeros_like(first[0][0, :1])], 0
    paths = torch.ones_like(first[1][:, :1])
    for level in range(1, depth + 1):
        best, probs = rankings[-1]
        chances = (paths * probs).flatten()
        paths, chosen = chances.topk(min(ROWS_PER_PASS, len(chances)))
        paths = paths[:, None]
        places.append(ranked + chosen)
        ranked += len(chances)
        rankings.append(extend(level, best.flatten()[chosen], chosen // best.shape[1]))
    best, probs = map(torch.cat, zip(*rankings, strict=True))
    followed = torch.cat(places)[:, None]
    return torch.cat([best, followed], dim=-1), torch.cat([probs, torch.zeros_like(probs[:, :1])], dim=-1)


class PathsInOneRun(BlockDrafter):
    """Reads accepted tokens and extends paths in one run of a module; drafts are deeper if steps accept more tokens."""

    _accepted_per_step = EXPECTED_TOKENS
    """Average number of tokens that a step accepts."""

    def _start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        if len(tokens) <= 1 + DEPTHS[-1]:  # else a prompt, or the tokens of a pause
            self._accepted_per_step += LEARNING_RATE * (len(tokens) - self._accepted_per_step)
        wanted = DEPTH_PER_TOKEN * (self._accepted_per_step - 1)
        depth = next((depth for depth in DEPTHS if depth >= wanted), DEPTHS[-1])
        self.module.draft_within_reading(min(depth, self.module.passes))
        return super()._start(hidden, tokens)


def path_drafter(
    module: DraftModule,
    in_one_run: bool,
    columns: slice | None,
    gate: TrainedDrafterGate | None,
    *,
    source: SourceId = SourceId.HEADS,
    odds: list[list[float]] | None = None,
) -> TrainedProposer:
    """Return a drafter that extends paths by a module; see ``SequentialDrafter`` for most arguments.

    With ``in_one_run``, where passes are captured, the host needn't wait between the passes of a draft.
    """
    if not in_one_run:
        return SequentialDrafter(module, columns=columns, source=source, gate=gate, odds=odds)
    calibration = Calibration(odds, MAX_CALIBRATED_DEPTH + 1)
    arrange = Proposal.in_tree if module.paths_per_pass > 1 else Proposal.in_turn
    return PathsInOneRun(module, calibration, columns, source=source, gate=gate, arrange=arrange)
