"""Draft models: small models with the target's tokenizer, and Gemma 4 assistants, which read the target's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from hdtool.data.errors import FamilyError, ModelError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.caches.kv_cache import NO_TENSOR
from hdtool.runtime.config.draft_sources import SourceId
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Ranked, TopTokens, Verified
from hdtool.runtime.core.prefix_cache import common_prefix_length
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.trained.checkpoints import loaded_once
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.drafters.trained.sequential import MAX_PASSES, NO_RANKING, ROWS_PER_PASS, SequentialDrafter
from hdtool.runtime.target.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdtool.runtime.budget.trained_drafter_gate import TrainedDrafterGate
    from hdtool.runtime.caches.slots import Slot
    from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
    from hdtool.runtime.target.target import Target


def draft_model_drafter(
    name: str, target: Target, tokenizer: TokenizerFingerprint | None, gate: TrainedDrafterGate | None = None
) -> SequentialDrafter:
    """Return a drafter for the small model called ``name``.

    Raise ModelError if the model's tokenizer differs from ``tokenizer``, which is the target's.
    """
    model = loaded_once(target, name, lambda: _loaded(name, target, tokenizer))
    module = DraftModel(model, target.vocabulary)
    on_cpu = target.device.type == "cpu"  # elsewhere, passes take the longer for their number of layers, not weights
    cost = model.model.num_parameters() / target.model.num_parameters() if on_cpu else 0.0
    return SequentialDrafter(module, source=SourceId.DRAFTER, gate=gate, relative_cost=cost, width=1)


def _loaded(name: str, target: Target, tokenizer: TokenizerFingerprint | None) -> Target:
    config = ModelConfig(name, device=str(target.device))
    loaded = load(config)
    fingerprint = TokenizerFingerprint.of(loaded.tokenizer)
    if tokenizer is not None and fingerprint != tokenizer:
        raise ModelError(
            f"drafter {name} has another tokenizer than the model ({fingerprint.vocab_size} tokens, not "
            f"{tokenizer.vocab_size}, or others): name a small model of the same family"
        )
    if not loaded.target.takes_trees:
        raise FamilyError(
            f"drafter {name} is of type {loaded.target.config.model_type!r}, whose drafts cannot be taken back: "
            "name another small model"
        )
    return loaded.target


class DraftModel:
    """A small model that drafts a chain token by token; rejected tokens are rolled back from its KV cache."""

    passes = MAX_PASSES

    def __init__(self, model: Target, vocabulary: int) -> None:
        """Only the first ``vocabulary`` token ids are drafted."""
        self._model, self._vocabulary = model, vocabulary
        self._cache = model.allocate()
        self.begin([])

    def begin(self, prompt: list[int]) -> None:
        self._model.notice_changes()
        self._context = list(prompt[:1])
        self._limit = self._model.context_limit(max(1, len(prompt)))
        """Maximum number of tokens that the model can read, after which it drafts nothing; None without a limit."""
        self._accepted = 0
        """Number of context tokens in the cache."""

    def skip(self, tokens: int) -> None:
        self.begin([])

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._context += tokens
        self._drafted = 0
        if max(tokens) >= self._model.vocabulary:
            self._limit = 0  # the model has no embedding for one of the tokens
        if self._is_full():
            return NO_RANKING
        slot = self._cache.slots[0]
        kept = self._accepted or slot.resumes_at(
            min(common_prefix_length(slot.tokens, self._context), len(self._context) - 1)
        )
        new = self._context[kept:]
        if len(new) > LARGEST_TREE or slot.length < kept or not kept:
            logits = self._model.prefill(self._cache, 0, new, kept).logits
        else:
            slot.cut(kept)
            logits = self._verified(DraftTree.of(new[0], new[1:], range(-1, len(new) - 2)), new[1:])
        self._cache.slots[0].keep_states()  # for recurrent models; not ``slot``, which a growing cache replaces
        self._accepted = len(self._context)
        return self._ranked(logits)

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        (token,) = tokens
        self._drafted += 1
        if self._is_full():
            return NO_RANKING
        return self._ranked(self._verified(DraftTree.bare(token), ()))

    def _is_full(self) -> bool:
        return self._limit is not None and len(self._context) + self._drafted > self._limit

    def _verified(self, tree: DraftTree, path: Sequence[int]) -> torch.Tensor:
        """Read a chain of tokens into the cache; return the logits after the last token."""
        (verified,) = self._model.verify(self._cache, [tree])
        logits = verified.logits[-1:]
        self._model.commit(self._cache, 0, range(len(path)))
        return logits

    def _ranked(self, logits: torch.Tensor) -> Ranked:
        return on_host(topk_tokens(logits[:, : self._vocabulary], TOKENS_PER_RANKING))


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
