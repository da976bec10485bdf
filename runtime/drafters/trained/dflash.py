"""DFlash and DSpark drafters, which predict a block of masked tokens in one pass, like a diffusion model.

They read the outputs of some layers of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.core.engine_interface import TopTokens
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.draft_passes import ReadingPasses
from hdtool.runtime.drafters.trained.dspark import MAX_POSITIONS
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import rankings_for
from hdtool.runtime.drafters.trained.proposal import MAX_RANKINGS, TOKENS_PER_RANKING, Calibration, Proposal
from hdtool.runtime.model.pass_inputs import CacheRows
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
    from hdtool.runtime.drafters.trained.dflash_checkpoints import DFlashModel
    from hdtool.runtime.target.target import Target


class DFlashPasses(ReadingPasses):
    """Passes of a drafter, each over accepted tokens and the block of masked tokens after them.

    The block reads the context and itself. The next accepted tokens overwrite it in the cache.
    """

    def __init__(self, model: DFlashModel, target: Target) -> None:
        positions = min(model.block - model.first, MAX_POSITIONS if model.heads else MAX_RANKINGS)
        self.positions = positions
        """Number of positions of a block for which tokens are ranked."""
        self._model, self._block = model, positions + model.first
        self._layers = target.drafter_layers(model.parts, model.windows)
        keys = [HeadShape(layer.heads, layer.width, target.dtype, target.device) for layer in model.parts.layers]
        super().__init__(
            [LayerShape(shape, shape) for shape in keys],
            torch.empty((0, model.read_width), dtype=target.dtype, device=target.device),
            target,
            windows=model.windows,
            rankings=rankings_for(positions - 1) if model.heads else positions,
            best=TOKENS_PER_RANKING + (model.heads is not None),
            drafted=self._block,
        )

    def _extent(self, rows: int, end: int) -> int:
        return super()._extent(rows, end + self._block)

    def _words(self, tokens: list[int], size: int) -> list[int]:
        """Return the places of the accepted tokens, padded to ``size``, and of the block, and the block's tokens."""
        start, padding = self.length + len(tokens), size - len(tokens)
        behind = start + self._block  # where padding is written
        places = [*range(self.length, start), *range(behind, behind + padding), *range(start, behind)]
        return [*places, tokens[-1], *[self._model.mask_token] * (self._block - 1)]

    def _cache_rows(self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, extent: int) -> None:
        mask = self._masks.causal_mask(places[:0], extent)
        rows = CacheRows(self._cache.storage, places, extent, mask)
        context = self._model.encode(hidden)
        self._layers.run(context[:0], places, rows, context=context)

    def _rank_last(self, hidden: torch.Tensor, extent: int, words: torch.Tensor) -> TopTokens:
        model, (places, noise) = self._model, words.split([len(words) - self._block, self._block])
        mask = self._masks.block_mask(places[-self._block :], extent, model.causal)
        rows = CacheRows(self._cache.storage, places, extent, mask)
        embedded = model.embed(noise[None])[0]
        states = self._layers.run(embedded, places, rows, context=model.encode(hidden))
        logits = model.head(states[model.first :])
        if model.heads:
            return model.heads.rank(noise[:1], states, logits, model.token_ids)
        return topk_tokens(logits, TOKENS_PER_RANKING, model.token_ids)


def dflash_drafter(model: DFlashModel, target: Target, gate: TrainedDrafterGate | None = None) -> BlockDrafter:
    """Return a drafter for a target with a DFlash or DSpark model."""
    columns, passes = target.watch_hidden(model.layer_ids), DFlashPasses(model, target)
    calibration = Calibration(None, passes.positions)
    arrange = Proposal.in_tree if model.heads else Proposal.in_parallel
    return BlockDrafter(passes, calibration, columns, source=SourceId.DRAFTER, gate=gate, arrange=arrange)
