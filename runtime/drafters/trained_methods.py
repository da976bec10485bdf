"""Selects a method's trained drafter: heads, MTP layers or a draft model.

``StandaloneDrafter`` drafts trees from that drafter alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.config.decoding import (
    DRAFT_MODEL,
    HEADS_DRAFTER,
    METHODS,
    MTP_DRAFTER,
    TAKE_TREE,
    TRAINED,
    DecodeConfig,
)
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.drafters.heads.checkpoint import heads_for, methods_with_heads
from hdtool.runtime.drafters.heads.modules import ParallelHeads
from hdtool.runtime.drafters.heads.state import HeadsState, sequential_drafter
from hdtool.runtime.drafters.trained.assistant import (
    AssistantDrafter,
    AssistantModule,
    draft_model_drafter,
    load_assistant,
)
from hdtool.runtime.drafters.trained.dflash import dflash_drafter, load_dflash
from hdtool.runtime.drafters.trained.draft_length import TrainedGate, pace_for
from hdtool.runtime.drafters.trained.eagle3 import EagleModule, load_eagle3
from hdtool.runtime.drafters.trained.mtp import mtp_drafter, mtp_layers_of
from hdtool.runtime.drafters.trained.proposal import (
    DFLASH,
    GEMMA_ASSISTANT,
    MAX_RANKINGS,
    SMALL_MODEL,
    PublishedDrafter,
    TrainedDrafter,
    best_paths,
    loaded_once,
)
from hdtool.runtime.drafters.trained.sequential import SequentialDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.data.stores.manifest import TokenizerFingerprint
    from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
    from hdtool.runtime.target.target import Target


class StandaloneDrafter(Drafter):
    """Drafts trees from a single trained drafter."""

    def __init__(
        self,
        trained: TrainedDrafter,
        budget: Budget,
        static: StaticTree | None = None,
        gate: TrainedGate | None = None,
    ) -> None:
        """With a ``gate``, the drafter runs only while it saves time; by default, it runs in every step.

        With a ``static`` tree, every draft has that shape; by default, a draft has the most probable nodes.
        """
        self.trained, self.budget = trained, budget
        self._gate = gate
        self._began: float | None = None
        """Time at which the current draft began; None without a gate, without a draft, or once its outcome is known."""
        self._used = True
        """True if the trained drafter ran for the current draft."""
        self._static = static
        self._parents = np.zeros(LARGEST_TREE, np.int32)
        self._ranks, self._rankings = np.zeros((2, LARGEST_TREE), np.int64)
        self._path_probs = np.zeros(LARGEST_TREE)
        self._sources = np.full(LARGEST_TREE, trained.source, np.uint8)
        # Compile the search, or load it from the cache, before the first step.
        self._best_paths(np.zeros((1, 1)), np.zeros((1, 1), np.int64), 1)

    def _best_paths(self, probs: npt.NDArray[np.float64], after: npt.NDArray[np.int64], max_nodes: int) -> int:
        return best_paths(probs, after, max_nodes, self._parents, self._ranks, self._rankings, self._path_probs)

    @property
    def seconds(self) -> dict[SourceId, float]:
        return {self.trained.source: self.trained.seconds}

    def begin(self, prompt: Sequence[int]) -> None:
        self.trained.begin(list(prompt))

    def draft(self, context: Sequence[int]) -> DraftTree:
        max_nodes = min(self.budget.max_nodes, LARGEST_TREE)
        self._began = time.perf_counter() if max_nodes and self._gate else None
        self._used = self._gate is None or self._gate.runs_drafter
        if not max_nodes or not self._used:
            return DraftTree.bare(context[-1])
        before = self.trained.seconds
        proposal = self.trained.propose(max_nodes)
        self.budget.set_draft_seconds(self.trained.seconds - before)
        if self._static:
            tree = self._static
            size = self.budget.choose_size(tree.gains[:max_nodes])
            parents, ranks, rankings = tree.parents[:size], tree.ranks[:size], tree.depths[:size] - 1
        else:
            assert len(proposal.tokens) <= MAX_RANKINGS
            grown = self._best_paths(proposal.probs, np.ascontiguousarray(proposal.after), max_nodes)
            size = self.budget.choose_size(self._path_probs[:grown])
            parents, ranks, rankings = self._parents[:size].copy(), self._ranks[:size], self._rankings[:size]
        return DraftTree(context[-1], proposal.tokens[rankings, ranks], parents, self._sources[:size])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.trained.observe(accepted, verified)
        if self._gate and self._began is not None:
            self._gate.observe(len(accepted.tokens), time.perf_counter() - self._began, self._used)
        self._began = None


class StaticTree:
    """A fixed shape for all draft trees, chosen when the heads were evaluated."""

    def __init__(self, saved: SavedHeads) -> None:
        paths = [tuple(path) for path in saved.evaluation.tree]
        places = {path: node for node, path in enumerate(paths)} | {(): ROOT}
        self.parents = np.array([places[path[:-1]] for path in paths], np.int32)
        self.ranks: npt.NDArray[np.int64] = np.array([path[-1] for path in paths], np.int64)
        self.depths: npt.NDArray[np.int64] = np.array([len(path) for path in paths], np.int64)
        self.gains: npt.NDArray[np.float64] = np.array(saved.evaluation.gains)


STATIC = "static"


def trained_drafter(
    config: DecodeConfig, target: Target, tokenizer: TokenizerFingerprint | None = None
) -> TrainedDrafter:
    """Return the trained drafter of ``config.method``; a draft model must share the target's ``tokenizer``."""
    kind, is_measured = config.trained, config.draft_tokens is None
    if kind == HEADS_DRAFTER or (
        kind == MTP_DRAFTER and config.method in methods_with_heads(config.heads, target.model)
    ):
        return drafter_of(heads_for(config.method, config.heads, target.model), target, is_measured=is_measured)
    if kind == MTP_DRAFTER:
        return mtp_drafter(target, is_measured=is_measured)
    assert config.drafter is not None
    return published_drafter(config.drafter, target, tokenizer, is_measured=is_measured)


def published_drafter(
    name: str, target: Target, tokenizer: TokenizerFingerprint | None = None, *, is_measured: bool
) -> TrainedDrafter:
    """Return a drafter for a published checkpoint: a drafter trained for the target, or any small language model.

    If ``is_measured``, drafters that draft token by token run only the passes that save time.
    """
    published = PublishedDrafter.named(name)
    kind = published.kind
    if kind == SMALL_MODEL:
        return draft_model_drafter(name, target, tokenizer, is_measured=is_measured)
    pace = pace_for(target, name, is_measured=is_measured)
    with target.changing():
        if kind == DFLASH:
            return dflash_drafter(loaded_once(target, name, lambda: load_dflash(published, target)), target)
        if kind == GEMMA_ASSISTANT:
            assistant = AssistantModule(loaded_once(target, name, lambda: load_assistant(published, target)), target)
            return AssistantDrafter(assistant, pace, columns=target.watch_hidden(), source=SourceId.DRAFTER)
        eagle, layers = loaded_once(target, name, lambda: load_eagle3(published, target))
        columns = target.watch_hidden(layers)
        return SequentialDrafter(EagleModule(eagle, target), pace, columns=columns, source=SourceId.DRAFTER)


def drafter_of(saved: SavedHeads, target: Target, *, is_measured: bool) -> TrainedDrafter:
    """Return the drafter that runs the heads: in parallel or token by token, depending on their class."""
    if isinstance(saved.heads, ParallelHeads):
        return HeadsState(saved, target)
    return sequential_drafter(saved, target, is_measured=is_measured)


def trained_alone(
    config: DecodeConfig, target: Target, budget: Budget, tokenizer: TokenizerFingerprint | None = None
) -> StandaloneDrafter:
    """Return the drafter for ``config.method``, which drafts only from a trained drafter."""
    gate = None if config.draft_tokens else gate_for(config, target)
    if config.method not in TAKE_TREE:
        return StandaloneDrafter(trained_drafter(config, target, tokenizer), budget, gate=gate)
    saved = heads_for(config.method, config.heads, target.model)
    static = StaticTree(saved) if config.tree == STATIC else None
    return StandaloneDrafter(HeadsState(saved, target), budget, static, gate)


def gate_for(config: DecodeConfig, target: Target) -> TrainedGate:
    """Return the ``TrainedGate`` that all drafters of ``config.method`` for this target share."""
    return loaded_once(target, f"{config.method}: gate", TrainedGate)


def methods_with_drafters(config: DecodeConfig, model: PreTrainedModel) -> set[str]:
    """Return the methods whose trained drafter is available, because ``config`` names it or the model includes it."""
    has_drafter = {
        HEADS_DRAFTER: False,
        MTP_DRAFTER: bool(mtp_layers_of(model)),
        DRAFT_MODEL: config.drafter is not None,
    }
    with_heads = methods_with_heads(config.heads, model)
    return {method for method in TRAINED if has_drafter[METHODS[method].trained] or method in with_heads}
