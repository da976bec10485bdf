"""Gemma 4 assistants: small models that read the target's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.kv_cache import NO_TENSOR, KVTensors, extent_for
from hdtool.runtime.core.engine_interface import Ranked, TopTokens, Verified
from hdtool.runtime.drafters.trained.draft_module import MAX_PASSES, NO_RANKING, ROWS_PER_PASS, DraftModule
from hdtool.runtime.drafters.trained.module_parts import on_host, topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import DEPTHS, rank_best_paths, rankings_for
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.model.pass_inputs import FULL, MOVES, SLIDING, AttentionMasks, AttentionWindow

if TYPE_CHECKING:
    from hdtool.runtime.caches.slots import Slot
    from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
    from hdtool.runtime.target.target import Target


class AssistantModule(DraftModule):
    """A Gemma 4 assistant, which has no KV cache and runs all passes at the position of the last accepted token."""

    passes = MAX_PASSES

    def __init__(self, assistant: Any, target: Target) -> None:
        self._assistant, self._embed = assistant, target.model.get_input_embeddings()
        self._layers, config = layers_read(target), assistant.config.get_text_config()
        # A token's distance to the last token that it reads is 1, and at most the window more to the others.
        windows = [AttentionWindow(FULL), AttentionWindow(SLIDING, config.sliding_window + 2)]
        self._masks = AttentionMasks(windows, target.dtype, target.device)
        self._passes = target.ranking_passes(rankings_for(DEPTHS[-1]), TOKENS_PER_RANKING + 1)
        self._slot: Slot | None = None
        """The target's slot that holds the conversation; None if it is unknown."""
        self._tokens: list[int] = []
        """The slot's list of tokens, which another list replaces if the conversation moves to another slot."""
        self._storage: KVTensors | None = None
        """The target's keys and values that the last draft read; captured passes read them again."""
        width = int(assistant.config.backbone_hidden_size)
        self._states = torch.zeros((1 + ROWS_PER_PASS * MAX_PASSES, width), dtype=target.dtype, device=target.device)
        self._before = torch.zeros_like(self._states[:1])
        """Hidden state before the last accepted token."""
        self._length, self._rows = 0, 0

    def begin(self, prompt: list[int]) -> None:
        self._slot, self._length = None, 0

    def follow(self, verified: Verified) -> None:
        """From now on, read keys and values from the target's slot for which ``verified`` was computed."""
        self._slot = slot = cast("Slot | None", verified.slot)  # a target has no other slots
        self._tokens = slot.tokens if slot else []

    def skip(self, tokens: int) -> None:
        self._length += tokens  # the target's KV cache holds them

    @torch.inference_mode()
    def start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        """Start to draft; return a function that waits for the rankings (``NO_RANKING`` if the slot is unknown)."""
        self._length += len(tokens)
        slot = self._slot
        if slot is None or slot.tokens is not self._tokens or slot.length != self._length:
            return lambda: NO_RANKING  # the conversation has moved to another slot; the next ``observe`` sets it
        self._storage = slot.kv.storage
        self._passes.read_from(self._storage)
        first, path = slot.kv.pending_move or (self._length, ())
        places = [first + offset for offset in path]
        extent = max([self._length, *(1 + place for place in places)])
        if self._passes.captures(1):
            extent = min(extent_for(extent), self._storage.capacity)
        self._before.copy_(hidden[-1:])
        self._rows = 1
        words = [tokens[-1], self._length, first, *places, *[extent] * (MOVES - len(places))]
        shape = f"read, {self.depth} deep", 1, extent
        return self._passes.start(shape, words, rankings_for(self.depth), partial(self._rank_tree, extent))

    def _rank_tree(self, extent: int, words: torch.Tensor) -> TopTokens:
        """Rank the tokens after an accepted token and, with ``depth``, after the best paths below it."""
        assert self._storage
        token, self._position, first, places = words.split([1, 1, 1, MOVES])
        self._mask = self._masks.mask_before_move(self._position, first, places, extent)
        self._kept = {
            kind: (self._storage.layers[layer][0][:, :, :extent], self._storage.layers[layer][1][:, :, :extent])
            for kind, layer in self._layers.items()
        }
        ranked, states = self._pass(self._before, token)
        self._states[:1].copy_(states)

        def extend(depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> TopTokens:
            nonlocal states
            ranked, states = self._pass(states.index_select(0, parents), tokens)
            return ranked

        return rank_best_paths(ranked, self.depth, extend) if self.depth else ranked

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        rows = slice(self._rows, self._rows + len(tokens))
        ranked, self._states[rows] = self._pass(self._states[parents], torch.tensor(tokens, device=self._states.device))
        self._rows = rows.stop
        return on_host(ranked)

    def _pass(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[TopTokens, torch.Tensor]:
        """Rank the next tokens after each of ``tokens``, given the states before them; also return the states after."""
        rows, assistant = len(tokens), self._assistant
        read = assistant.pre_projection(torch.cat([self._embed(tokens), hidden], dim=-1))
        output = assistant.model(
            inputs_embeds=read[:, None],
            attention_mask=self._mask,
            position_ids=self._position.expand(rows, 1),
            shared_kv_states={
                kind: (keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
                for kind, (keys, values) in self._kept.items()
            },
            use_cache=False,
        )
        states = output.last_hidden_state[:, 0]
        logits = self._logits(states)
        return topk_tokens(logits, TOKENS_PER_RANKING), assistant.post_projection(states)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits; if the assistant clusters tokens, those outside the best clusters share the lowest logit."""
        clusters, head = self._assistant.masked_embedding, self._assistant.lm_head
        if clusters is None:
            return cast(torch.Tensor, head(states))
        best = clusters.centroids(states).topk(clusters.centroid_intermediate_top_k).indices
        tokens = clusters.token_ordering.long().view(clusters.num_centroids, -1)[best].flatten(1)
        logits: torch.Tensor = (head.weight[tokens] @ states[..., None])[..., 0]
        return (logits.min() - 1.0).expand(len(states), clusters.vocab_size).scatter(1, tokens, logits)


def layers_read(target: Target) -> dict[str, int]:
    """Return, for each attention type, the target's last layer of that type that stores keys and values."""
    storage = target.cache.storage
    kinds = getattr(target.config, "layer_types", None) or ()
    return {kind: layer for layer, kind in enumerate(kinds) if storage.layers[layer][0] is not NO_TENSOR}


def load_assistant(published: PublishedDrafter, target: Target) -> Any:
    """Load a Gemma 4 assistant; raise HeadsError or FamilyError if it cannot be loaded or does not fit the target."""
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
