"""Drafting token by token by heads of ``train-heads``: Hydra's, and a layer for multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache
from hdtool.runtime.drafters.heads.modules import best_of
from hdtool.runtime.drafters.heads.sequential_modules import HydraHeads, MtpHeads
from hdtool.runtime.drafters.heads.static_pass import Best, FixedPass
from hdtool.runtime.drafters.trained.draft_passes import CHUNK, DraftPasses, on_host
from hdtool.runtime.drafters.trained.pace import pace_for
from hdtool.runtime.drafters.trained.proposal import BEST
from hdtool.runtime.drafters.trained.ranked_block import RankedBlock
from hdtool.runtime.drafters.trained.sequential import WIDTH, Ranked, SequentialDrafter, SequentialModule
from hdtool.runtime.kernels.linear import compile_linear_layers

if TYPE_CHECKING:
    from hdtool.runtime.model.cuda_graphs import Run
    from hdtool.runtime.model.target import Target

SIZES = (1, 2, WIDTH)
"""Rows of a captured pass that extends paths."""


def sequential_drafter(saved: SavedHeads, target: Target, *, is_measured: bool) -> SequentialDrafter:
    """A drafter by heads that draft token by token; measured, it makes the passes that pay."""
    columns = target.watch_hidden()
    if target.device.type == "cpu":
        compile_linear_layers(saved.heads)
    pace = pace_for(target, str(saved.heads.config), is_measured=is_measured)
    module: SequentialModule
    if isinstance(saved.heads, HydraHeads):
        module = HydraModule(saved.heads, target)
    else:
        assert isinstance(saved.heads, MtpHeads)
        module = TrainedMtp(saved.heads, target)
    return SequentialDrafter(module, pace, columns=columns, odds=saved.judged.odds or None)


class HydraModule:
    """Hydra heads during an answer: a row is a path, which a head reads as a whole.

    Row 0 is the last accepted token; each row of ``extend`` gets the next number.
    """

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        self.passes = heads.config.heads - 1
        self._heads, self._embed = heads, target.model.get_input_embeddings()
        self._cache, self._device = HeadsKVCache.of(heads), heads.like.device
        rows = 1 + WIDTH * self.passes
        self._before = heads.like.new_zeros((1, heads.shape.width))
        """What the heads read before the paths."""
        self._paths = heads.like.new_zeros((rows, heads.config.heads, heads.shape.embedding))
        """The normed embeddings of each path."""
        self._depths = [0]
        """How far each row is from row 0."""
        reading, extending = target.new_recorder(), target.new_recorder()
        self._reading = FixedPass(heads, self._embed, BEST, reading, self._begun) if reading else None
        self._extending = extending
        pinned = self._device.type == "cuda"
        self._host = torch.zeros((3, WIDTH), dtype=torch.int64, pin_memory=pinned)
        self._input = self._host.to(self._device, copy=True)
        """The rows that a captured pass extends, their new tokens, and the rows that it writes."""
        self._captured: dict[tuple[int, int], Run] = {}
        self._result = RankedBlock(WIDTH, min(BEST, heads.vocabulary), self._device)

    def begin(self, prompt: list[int]) -> None:
        self._cache.restart()

    def skip(self, tokens: int) -> None:
        self._cache.restart()

    @torch.inference_mode()
    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._depths = [0]
        if not self._heads.layers:
            hidden, tokens = hidden[-1:], tokens[-1:]
        if self._reading and self._reading.fits(len(tokens)):
            return self._reading.read(hidden, tokens, self._cache)
        self._cache.make_room(self._cache.length + len(tokens))
        for start in range(0, len(tokens), CHUNK):
            part = hidden[start : start + CHUNK]
            stages = self._heads.read(part, part, self._cache)  # the layers read no tokens
        return on_host(self._begun(stages, torch.tensor(tokens[-1:], device=self._device)))

    @torch.inference_mode()
    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        first, new = len(self._depths), len(tokens)
        depth = self._depths[parents[0]] + 1
        self._depths += [depth] * new
        rows = list(range(first, first + new))
        if not self._extending:
            return on_host(self._extended(depth, torch.tensor([parents, tokens, rows], device=self._device)))
        size = next(size for size in SIZES if size >= new)
        padding = [0] * (size - new)  # extends row 0 in place, of which only the first token is read
        self._host[:, :size] = torch.tensor([parents + padding, tokens + padding, rows + padding])
        self._input.copy_(self._host, non_blocking=True)
        if (depth, size) not in self._captured:
            self._captured[depth, size] = self._record(depth, size)
        self._captured[depth, size]()
        return self._result.received(new)

    def _begun(self, stages: list[torch.Tensor], token: torch.Tensor) -> Best:
        """Begin row 0 with an accepted token; rank what follows it."""
        self._before.copy_(stages[-1])
        self._paths[:1, 0].copy_(self._normed(token))
        return self._best(0, self._paths[:1])

    def _extended(self, depth: int, given: torch.Tensor) -> Best:
        parents, tokens, rows = given
        paths = self._paths.index_select(0, parents)
        paths[:, depth] = self._normed(tokens)
        self._paths.index_copy_(0, rows, paths)
        return self._best(depth, paths)

    def _normed(self, tokens: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._heads.token_norm(self._embed(tokens))
        return normed

    def _best(self, head: int, paths: torch.Tensor) -> Best:
        before = self._before.expand(len(paths), -1)
        states = self._heads.state(head, before, paths[:, : head + 1].flatten(1))
        return best_of(self._heads.output(head)(states), BEST, self._heads.token_ids)

    def _record(self, depth: int, size: int) -> Run:
        assert self._extending

        def run() -> None:
            self._result.write(*self._extended(depth, self._input[:, :size]))

        return self._extending.record(run)


class TrainedMtp(DraftPasses):
    """A layer that ``train-heads`` made, and that drafts as a layer of a checkpoint does."""

    def __init__(self, heads: MtpHeads, target: Target) -> None:
        embed = target.model.get_input_embeddings()

        def run(
            tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor
        ) -> torch.Tensor:
            return heads.run(embed(tokens), hidden, positions, cache, mask)

        super().__init__(
            run,
            lambda hidden: best_of(heads.output(0)(hidden), BEST, heads.token_ids),
            heads.shapes(),
            width=heads.shape.width,
            window=None,
            target=target,
        )
