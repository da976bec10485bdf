"""Run drafting heads during generation: read accepted tokens with their hidden states, and rank the next tokens."""

from __future__ import annotations

from functools import partial

import torch

from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.core.engine_interface import Ranked, TopTokens
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.modules import Heads, HydraHeads, MtpHeads, ParallelHeads
from hdtool.runtime.drafters.trained.block_drafter import BlockDrafter
from hdtool.runtime.drafters.trained.draft_module import ROWS_PER_PASS, DraftModule
from hdtool.runtime.drafters.trained.draft_passes import DraftPasses, Module, ModulePasses
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import path_drafter, rankings_for
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Calibration
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.model.pass_inputs import FULL, CacheRows
from hdtool.runtime.target.target import Target


def module_of(heads: Heads, target: Target) -> Module:
    """Return a function that runs the adaptation layers of heads, with the target's embeddings if they read tokens."""
    embed = target.model.get_input_embeddings()

    def run(tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: CacheRows) -> list[torch.Tensor]:
        read = (embed(tokens) if heads.reads_tokens else hidden)[None]
        stages = heads.stages(hidden[None], read, positions[None], rows.cache, rows.mask_of(FULL))
        return [stage[0] for stage in stages]

    return run


class HeadsState(BlockDrafter):
    """State of parallel heads while their target generates answers: KV cache, pending input and latest rankings."""

    def __init__(self, saved: SavedHeads, target: Target, gate: TrainedDrafterGate | None = None) -> None:
        assert isinstance(saved.heads, ParallelHeads)
        self.saved, self.heads = saved, (heads := saved.heads)
        if target.device.type == "cpu":
            compile_linear_layers(heads)
        columns = target.watch_hidden()
        self.reading = ModulePasses(
            module_of(heads, target),
            lambda stages, token: topk_tokens(
                heads.logits(heads.states(stages))[:, 0], TOKENS_PER_RANKING, heads.token_ids
            ),
            heads.shapes(),
            heads.like.new_empty((0, heads.shape.width)),
            target,
            rankings=heads.config.heads,
        )
        calibration = Calibration(saved.evaluation.odds or None, heads.config.heads)
        super().__init__(self.reading, calibration, columns, gate=gate)


def sequential_drafter(saved: SavedHeads, target: Target, gate: TrainedDrafterGate | None = None) -> TrainedProposer:
    """Return a drafter for heads that draft token by token."""
    columns = target.watch_hidden()
    if target.device.type == "cpu":
        compile_linear_layers(saved.heads)
    module: DraftModule
    if isinstance(saved.heads, HydraHeads):
        module = HydraModule(saved.heads, target)
    else:
        assert isinstance(saved.heads, MtpHeads)
        module = TrainedMtp(saved.heads, target)
    return path_drafter(module, target.captures, columns, gate, odds=saved.evaluation.odds or None)


class HydraModule(ModulePasses):
    """Ranks next tokens with Hydra heads. A head reads a whole draft path, and each path is a row.

    Row 0 is the last accepted token; ``extend`` numbers its rows consecutively after it.
    """

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        self.passes = heads.config.heads - 1
        self._heads, self._embed = heads, target.model.get_input_embeddings()
        self._before = heads.like.new_zeros((1, heads.shape.width))
        """States that the heads read before the paths, ``[1, width]``."""
        rows = 1 + ROWS_PER_PASS * self.passes
        self._paths = heads.like.new_zeros((rows, heads.config.heads, heads.shape.embedding))
        """Normed embeddings of the tokens on each path, ``[rows, heads, width]``."""
        super().__init__(
            module_of(heads, target),
            self._start_path,
            heads.shapes(),
            self._before,
            target,
            rankings=rankings_for(self.passes),
            best=TOKENS_PER_RANKING + 1,
        )
        self.draft_within_reading(0)

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._depths = [0]
        """Distance of each row from row 0, in tokens."""
        return super().read(hidden, tokens)

    @torch.inference_mode()
    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        first, new = len(self._depths), len(tokens)
        depth = self._depths[parents[0]] + 1
        self._depths += [depth] * new
        size = self._passes.size_for(new)
        padding = [0] * (size - new)  # padding rewrites row 0, of which only the first token is ever read
        words = [*parents, *padding, *tokens, *padding, *range(first, first + new), *padding]
        return self._passes.run(("extend", size, depth), words, new, partial(self._extend_paths, depth))

    def _start_path(self, stages: list[torch.Tensor], token: torch.Tensor) -> TopTokens:
        """Store an accepted token as row 0, where all paths begin, and rank the next tokens."""
        self._before.copy_(stages[-1])
        self._paths[:1, 0].copy_(self._embed_normed(token))
        paths = self._paths[:1]

        def extend(depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> TopTokens:
            nonlocal paths
            paths = paths.index_select(0, parents)
            paths[:, depth] = self._embed_normed(tokens)
            return self._best(depth, paths)

        return self._with_paths(self._best(0, paths), extend)

    def _extend_paths(self, depth: int, given: torch.Tensor) -> TopTokens:
        parents, tokens, rows = given.view(3, -1)
        paths = self._paths.index_select(0, parents)
        paths[:, depth] = self._embed_normed(tokens)
        self._paths.index_copy_(0, rows, paths)
        return self._best(depth, paths)

    def _embed_normed(self, tokens: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._heads.token_norm(self._embed(tokens))
        return normed

    def _best(self, head: int, paths: torch.Tensor) -> TopTokens:
        before = self._before.expand(len(paths), -1)
        states = self._heads.state(head, before, paths[:, : head + 1].flatten(1))
        return topk_tokens(self._heads.output(head)(states), TOKENS_PER_RANKING, self._heads.token_ids)


class TrainedMtp(DraftPasses):
    """An MTP layer trained by ``train-heads``; it drafts like one from a model's checkpoint."""

    def __init__(self, heads: MtpHeads, target: Target) -> None:
        super().__init__(
            module_of(heads, target),
            lambda hidden: topk_tokens(heads.output(0)(hidden), TOKENS_PER_RANKING, heads.token_ids),
            heads.shapes(),
            width=heads.shape.width,
            target=target,
        )
