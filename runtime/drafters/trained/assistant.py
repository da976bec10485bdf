"""Assistants of Gemma 4: small models that attend to the keys and values of their target instead of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError, HeadsError, reason_of
from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.heads.modules import best_of
from hdtool.runtime.drafters.trained.draft_passes import on_host
from hdtool.runtime.drafters.trained.proposal import BEST
from hdtool.runtime.drafters.trained.sequential import DEEPEST, NO_RANKING, WIDTH, Ranked, SequentialDrafter
from hdtool.runtime.model.cache.kv_cache import NOTHING
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.drafters.trained.published_drafter import PublishedDrafter
    from hdtool.runtime.model.cache.slots import Slot
    from hdtool.runtime.model.target import Target

Views = dict[str, tuple[torch.Tensor, torch.Tensor]]


class AssistantModule:
    """An assistant; all its passes are at the position of the last accepted token, and it has no cache."""

    passes = DEEPEST

    def __init__(self, assistant: Any, target: Target) -> None:
        self._assistant, self._embed = assistant, target.model.get_input_embeddings()
        self._layers = layers_read(target)
        self.slot: Slot | None = None
        """Where the target keeps the conversation."""
        width = int(assistant.config.backbone_hidden_size)
        self._states = torch.zeros((1 + WIDTH * DEEPEST, width), dtype=target.dtype, device=target.device)
        self._length, self._rows = 0, 0

    def begin(self, prompt: list[int]) -> None:
        self.slot, self._length = None, 0

    def skip(self, tokens: int) -> None:
        self._length += tokens  # their keys are the target's

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._length += len(tokens)
        slot = self.slot
        if slot is None or slot.length != self._length:
            return NO_RANKING  # the conversation has moved to another slot, which the next step names
        slot.kv.settle()
        kept = slot.kv.storage.layers
        self._kept: Views = {
            kind: (kept[layer][0][:, :, : self._length], kept[layer][1][:, :, : self._length])
            for kind, layer in self._layers.items()
        }
        self._rows = 0
        return self._pass(hidden[-1:], tokens[-1:])

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        return self._pass(self._states[parents], tokens)

    def _pass(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        """Rank what follows tokens with the hidden states before them, each in a batch entry of its own."""
        rows = len(tokens)
        ids = torch.tensor(tokens, device=hidden.device)[:, None]
        found = self._assistant(
            inputs_embeds=torch.cat([self._embed(ids), hidden[:, None]], dim=-1),
            attention_mask=None,
            position_ids=torch.full((rows, 1), self._length, device=hidden.device),
            shared_kv_states={
                kind: (keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
                for kind, (keys, values) in self._kept.items()
            },
            use_cache=False,
        )
        self._states[self._rows : self._rows + rows] = found.last_hidden_state[:, 0]
        self._rows += rows
        return on_host(best_of(found.logits[:, 0], BEST))


class AssistantDrafter(SequentialDrafter):
    """An assistant during the answers of a target."""

    module: AssistantModule

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        self.module.slot = verified.slot


def layers_read(target: Target) -> dict[str, int]:
    """The last layer of each kind that keeps keys and values."""
    storage = target.cache.storage
    kinds = getattr(target.config, "layer_types", None) or ()
    return {kind: layer for layer, kind in enumerate(kinds) if storage.layers[layer][0] is not NOTHING}


def load_assistant(published: PublishedDrafter, target: Target) -> Any:
    """The model of an assistant of a target; HeadsError says why it is none."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(published.folder)
    except Exception as error:  # the library raises many kinds
        raise HeadsError(f"drafter {published.name} cannot be loaded ({reason_of(error)}): name another one") from error
    width = int(target.config.hidden_size)
    stated = getattr(model.config, "backbone_hidden_size", None)
    if stated != width:
        raise HeadsError(
            f"drafter {published.name} is for a model of width {stated}, and this one has {width}: name a drafter of "
            "this model"
        )
    kinds = set(model.config.get_text_config().layer_types)
    if not kinds <= layers_read(target).keys():
        raise FamilyError(
            f"drafter {published.name} reads layers of kinds {', '.join(sorted(kinds))}, which models of type "
            f"{target.config.model_type!r} do not have: name a drafter of this model"
        )
    return model.to(target.device, target.dtype).requires_grad_(False).eval()
