"""Gemma 4 assistants: small models that read the target's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.kv_cache import NO_TENSOR
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Ranked, TopTokens, Verified
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.drafters.trained.sequential import MAX_PASSES, NO_RANKING, ROWS_PER_PASS, SequentialDrafter

if TYPE_CHECKING:
    from hdtool.runtime.caches.slots import Slot
    from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
    from hdtool.runtime.target.target import Target


KeyValueViews = dict[str, tuple[torch.Tensor, torch.Tensor]]


class AssistantModule:
    """A Gemma 4 assistant, which has no KV cache and runs all passes at the position of the last accepted token."""

    passes = MAX_PASSES

    def __init__(self, assistant: Any, target: Target) -> None:
        self._assistant, self._embed = assistant, target.model.get_input_embeddings()
        self._layers = layers_read(target)
        self._slot: Slot | None = None
        """The target's slot that holds the conversation; None if it is unknown."""
        self._tokens: list[int] = []
        """The slot's list of tokens, which another list replaces if the conversation moves to another slot."""
        width = int(assistant.config.backbone_hidden_size)
        self._states = torch.zeros((1 + ROWS_PER_PASS * MAX_PASSES, width), dtype=target.dtype, device=target.device)
        self._length, self._rows = 0, 0

    def begin(self, prompt: list[int]) -> None:
        self._slot, self._length = None, 0

    def follow(self, slot: Slot | None) -> None:
        """Read the conversation's keys and values from a slot of the target."""
        self._slot, self._tokens = slot, slot.tokens if slot else []

    def skip(self, tokens: int) -> None:
        self._length += tokens  # the target's KV cache holds them

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._length += len(tokens)
        slot = self._slot
        if slot is None or slot.tokens is not self._tokens or slot.length != self._length:
            return NO_RANKING  # the conversation has moved to another slot; the next ``observe`` sets it
        slot.kv.settle()
        kept = slot.kv.storage.layers
        self._kept: KeyValueViews = {
            kind: (kept[layer][0][:, :, : self._length], kept[layer][1][:, :, : self._length])
            for kind, layer in self._layers.items()
        }
        self._rows = 0
        return self._pass(hidden[-1:], tokens[-1:])

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        return self._pass(self._states[parents], tokens)

    def _pass(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        """Rank the tokens that may follow each of ``tokens``, given the hidden state before it, as a batch."""
        rows = len(tokens)
        ids = torch.tensor(tokens, device=hidden.device)[:, None]
        output = self._assistant(
            inputs_embeds=torch.cat([self._embed(ids), hidden[:, None]], dim=-1),
            attention_mask=None,
            position_ids=torch.full((rows, 1), self._length, device=hidden.device),
            shared_kv_states={
                kind: (keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
                for kind, (keys, values) in self._kept.items()
            },
            use_cache=False,
        )
        self._states[self._rows : self._rows + rows] = output.last_hidden_state[:, 0]
        self._rows += rows
        return on_host(topk_tokens(output.logits[:, 0], TOKENS_PER_RANKING))


class AssistantDrafter(SequentialDrafter):
    """A sequential drafter that tells its assistant which slot of the target holds the conversation."""

    module: AssistantModule

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        self.module.follow(cast("Slot | None", verified.slot))  # a target has no other slots


def layers_read(target: Target) -> dict[str, int]:
    """Return, for each attention type, the target's last layer of that type that stores keys and values."""
    storage = target.cache.storage
    kinds = getattr(target.config, "layer_types", None) or ()
    return {kind: layer for layer, kind in enumerate(kinds) if storage.layers[layer][0] is not NO_TENSOR}


def load_assistant(published: PublishedDrafter, target: Target) -> Any:
    """Load a Gemma 4 assistant; raise HeadsError or FamilyError if it does not fit the target."""
    from transformers import AutoModelForCausalLM

    model = published.pretrained(AutoModelForCausalLM)
    published.require_width(getattr(model.config, "backbone_hidden_size", None), target)
    kinds = set(model.config.get_text_config().layer_types)
    if not kinds <= layers_read(target).keys():
        raise FamilyError(
            f"drafter {published.name} reads layers of kinds {', '.join(sorted(kinds))}, which models of type "
            f"{target.config.model_type!r} do not have: name a drafter of this model"
        )
    return model.to(target.device, target.dtype).requires_grad_(False).eval()


def on_host(ranked: TopTokens) -> Ranked:
    tokens, probs = ranked
    return tokens.cpu().numpy(), probs.cpu().numpy()
