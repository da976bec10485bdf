"""Selects the trained drafter of a method: heads in a folder, layers of the checkpoint, or a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdtool.runtime.config import METHODS, OPTION_METHODS, TRAINED, DecodeConfig
from hdtool.runtime.config.methods import DRAFTER, HEADS, MTP
from hdtool.runtime.drafters.heads.modules import ParallelHeads
from hdtool.runtime.drafters.heads.select_heads import heads_for, methods_with_heads
from hdtool.runtime.drafters.heads.state import HeadsState
from hdtool.runtime.drafters.heads.token_by_token import sequential_drafter
from hdtool.runtime.drafters.trained.assistant import AssistantDrafter, AssistantModule, load_assistant
from hdtool.runtime.drafters.trained.dflash import DFlashDrafter, load_dflash
from hdtool.runtime.drafters.trained.draft_model import draft_model_drafter
from hdtool.runtime.drafters.trained.eagle3 import EagleModule, load_eagle3
from hdtool.runtime.drafters.trained.gate import TrainedGate
from hdtool.runtime.drafters.trained.library_mtp import mtp_layers_of
from hdtool.runtime.drafters.trained.loaded_once import loaded_once
from hdtool.runtime.drafters.trained.mtp import mtp_drafter
from hdtool.runtime.drafters.trained.pace import pace_for
from hdtool.runtime.drafters.trained.published_drafter import ASSISTANT, DFLASH, MODEL, PublishedDrafter
from hdtool.runtime.drafters.trained.sequential import SequentialDrafter
from hdtool.runtime.drafters.trained.standalone import StandaloneDrafter, StaticTree
from hdtool.runtime.source_names import SourceName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.data.stores.manifest import TokenizerFingerprint
    from hdtool.runtime.budget.node_budget import Budget
    from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
    from hdtool.runtime.drafters.trained.proposal import TrainedDrafter
    from hdtool.runtime.model.target import Target

STATIC = "static"


def trained_drafter(
    config: DecodeConfig, target: Target, tokenizer: TokenizerFingerprint | None = None
) -> TrainedDrafter:
    """The trained drafter of a method; a draft model must have this ``tokenizer``."""
    kind, is_measured = METHODS[config.method].trained, config.draft_tokens is None
    if kind == HEADS or (kind == MTP and config.method in methods_with_heads(config.heads, target.model)):
        return drafter_of(heads_for(config.method, config.heads, target.model), target, is_measured=is_measured)
    if kind == MTP:
        return mtp_drafter(target, is_measured=is_measured)
    assert config.drafter is not None
    return published_drafter(config.drafter, target, tokenizer, is_measured=is_measured)


def published_drafter(
    name: str, target: Target, tokenizer: TokenizerFingerprint | None = None, *, is_measured: bool
) -> TrainedDrafter:
    """A drafter that was published for a target, or any small model; measured, it makes the passes that pay."""
    published = PublishedDrafter.named(name)
    kind = published.kind
    if kind == MODEL:
        return draft_model_drafter(name, target, tokenizer, is_measured=is_measured)
    pace = pace_for(target, name, is_measured=is_measured)
    with target.changing():
        if kind == DFLASH:
            return DFlashDrafter(loaded_once(target, name, lambda: load_dflash(published, target)), target)
        if kind == ASSISTANT:
            assistant = AssistantModule(loaded_once(target, name, lambda: load_assistant(published, target)), target)
            return AssistantDrafter(assistant, pace, columns=target.watch_hidden(), source=SourceName.DRAFTER)
        eagle, layers = loaded_once(target, name, lambda: load_eagle3(published, target))
        columns = target.watch_hidden(layers)
        return SequentialDrafter(EagleModule(eagle, target), pace, columns=columns, source=SourceName.DRAFTER)


def drafter_of(saved: SavedHeads, target: Target, *, is_measured: bool) -> TrainedDrafter:
    """The drafter of some heads, all at once or token by token."""
    if isinstance(saved.heads, ParallelHeads):
        return HeadsState(saved, target)
    return sequential_drafter(saved, target, is_measured=is_measured)


def trained_alone(
    config: DecodeConfig, target: Target, budget: Budget, tokenizer: TokenizerFingerprint | None = None
) -> StandaloneDrafter:
    """The drafter of a method that has no other source."""
    gate = None if config.draft_tokens else gate_for(config, target)
    if config.method not in OPTION_METHODS["tree"]:
        return StandaloneDrafter(trained_drafter(config, target, tokenizer), budget, gate=gate)
    saved = heads_for(config.method, config.heads, target.model)
    static = StaticTree(saved) if config.tree == STATIC else None
    return StandaloneDrafter(HeadsState(saved, target), budget, static, gate)


def gate_for(config: DecodeConfig, target: Target) -> TrainedGate:
    """The gate that drafters of one method share."""
    return loaded_once(target, f"{config.method}: gate", TrainedGate)


def methods_with_drafters(config: DecodeConfig, model: PreTrainedModel) -> set[str]:
    """The methods whose trained drafter is there: found, shipped with the model, or named."""
    found = {HEADS: False, MTP: bool(mtp_layers_of(model)), DRAFTER: config.drafter is not None}
    with_heads = methods_with_heads(config.heads, model)
    return {method for method in TRAINED if found[METHODS[method].trained] or method in with_heads}
