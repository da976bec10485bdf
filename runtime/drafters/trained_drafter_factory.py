"""Makes the trained drafter of a method: heads, MTP layers, a published drafter or a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
from hdtool.runtime.drafters.heads.checkpoint import heads_for, methods_with_heads
from hdtool.runtime.drafters.heads.head_rankings import HeadsState, sequential_drafter
from hdtool.runtime.drafters.heads.modules import ParallelHeads
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter, StaticTree
from hdtool.runtime.drafters.trained.checkpoints import (
    DFLASH,
    GEMMA_ASSISTANT,
    SMALL_MODEL,
    PublishedDrafter,
    loaded_once,
)
from hdtool.runtime.drafters.trained.dflash import dflash_drafter
from hdtool.runtime.drafters.trained.dflash_checkpoints import load_dflash
from hdtool.runtime.drafters.trained.draft_model import draft_model_drafter
from hdtool.runtime.drafters.trained.eagle3_model import EagleModule, load_eagle3
from hdtool.runtime.drafters.trained.gemma4_assistant import AssistantModule, load_assistant
from hdtool.runtime.drafters.trained.mtp import mtp_drafter, mtp_layers_of
from hdtool.runtime.drafters.trained.path_drafting import path_drafter
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.settings.decoding import (
    DRAFT_MODEL,
    HEADS_DRAFTER,
    METHODS,
    MTP_DRAFTER,
    TAKE_TREE,
    TRAINED,
    DecodeConfig,
)
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.data.stores.manifest import TokenizerFingerprint
    from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
    from hdtool.runtime.target.target import Target

STATIC = "static"


def trained_drafter(
    config: DecodeConfig, target: Target, tokenizer: TokenizerFingerprint | None = None
) -> TrainedProposer:
    """Return the trained drafter of ``config.method``; a draft model must share the target's ``tokenizer``.

    Unless the number of draft tokens is fixed, the drafters of a method for this target share a gate. Raise HeadsError
    or ModelError if there is no usable drafter.
    """
    kind, gate = config.trained, None
    if config.draft_tokens is None:
        gate = loaded_once(target, f"{config.method}: gate", lambda: TrainedDrafterGate(target.log))
    if kind == HEADS_DRAFTER or (
        kind == MTP_DRAFTER and config.method in methods_with_heads(config.heads, target.model)
    ):
        return drafter_of(heads_for(config.method, config.heads, target.model), target, gate)
    if kind == MTP_DRAFTER:
        return mtp_drafter(target, gate)
    assert config.drafter is not None
    return published_drafter(config.drafter, target, tokenizer, gate)


def published_drafter(
    name: str, target: Target, tokenizer: TokenizerFingerprint | None = None, gate: TrainedDrafterGate | None = None
) -> TrainedProposer:
    """Return a drafter for checkpoint ``name``: one trained for the target, or a language model with its tokenizer."""
    published = PublishedDrafter.named(name)
    kind = published.kind
    if kind == SMALL_MODEL:
        return draft_model_drafter(name, target, tokenizer, gate)
    with target.changing():
        if kind == DFLASH:
            return dflash_drafter(loaded_once(target, name, lambda: load_dflash(published, target)), target, gate)
        if kind == GEMMA_ASSISTANT:
            assistant = AssistantModule(loaded_once(target, name, lambda: load_assistant(published, target)), target)
            columns = target.watch_hidden()
            return path_drafter(assistant, target.captures, columns, gate, source=SourceId.DRAFTER)
        eagle, layers = loaded_once(target, name, lambda: load_eagle3(published, target))
        columns = target.watch_hidden(layers)
        return path_drafter(EagleModule(eagle, target), target.captures, columns, gate, source=SourceId.DRAFTER)


def drafter_of(saved: SavedHeads, target: Target, gate: TrainedDrafterGate | None = None) -> TrainedProposer:
    """Return the drafter that runs the heads: in parallel or token by token, depending on their class."""
    return (HeadsState if isinstance(saved.heads, ParallelHeads) else sequential_drafter)(saved, target, gate)


def trained_alone(
    config: DecodeConfig, target: Target, budget: Budget, tokenizer: TokenizerFingerprint | None = None
) -> StandaloneDrafter:
    """Return the drafter for ``config.method``, which drafts only from a trained drafter."""
    trained = trained_drafter(config, target, tokenizer)
    if config.method not in TAKE_TREE or config.tree != STATIC:
        return StandaloneDrafter(trained, budget)
    assert isinstance(trained, HeadsState)
    return StandaloneDrafter(trained, budget, StaticTree(trained.saved))


def methods_with_drafters(config: DecodeConfig, model: PreTrainedModel) -> set[str]:
    """Return the methods whose trained drafter is available: named in ``config``, in the model, or in the demo."""
    has_drafter = {
        HEADS_DRAFTER: False,
        MTP_DRAFTER: bool(mtp_layers_of(model)),
        DRAFT_MODEL: config.drafter is not None,
    }
    with_heads = methods_with_heads(config.heads, model)
    return {method for method in TRAINED if has_drafter[METHODS[method].trained] or method in with_heads}
