"""DFlash drafters, which predict a block of masked tokens in one pass, like a diffusion model.

They read the outputs of some layers of the target. The drafter's model comes from transformers.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError, HeadsError
from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.config.draft_sources import SourceId
from hdtool.runtime.core.engine_interface import TopTokens
from hdtool.runtime.drafters.trained.draft_passes import ReadingPasses
from hdtool.runtime.drafters.trained.module_parts import Norm, topk_tokens
from hdtool.runtime.drafters.trained.proposal import MAX_RANKINGS, TOKENS_PER_RANKING, Calibration
from hdtool.runtime.drafters.trained.sequential import BlockDrafter
from hdtool.runtime.model.pass_inputs import CacheRows, windows_of
from hdtool.runtime.program.mixer_parts import epsilon_of

if TYPE_CHECKING:
    from hdtool.runtime.budget.gate import Gate
    from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter
    from hdtool.runtime.target.target import Target


class DFlashPasses(ReadingPasses):
    """Passes of a DFlash model, each over accepted tokens and the block of masked tokens after them.

    The block reads the context and all of itself. The next accepted tokens overwrite it in the cache.
    """

    def __init__(self, model: Any, target: Target) -> None:
        config = model.config
        self._block = min(int(config.block_size), MAX_RANKINGS + 1)
        """Number of tokens in a block, of which the first is the last accepted one."""
        self._model, self._mask_token = model, int(config.mask_token_id)
        self._embed = without_norm(target.model.get_input_embeddings())
        self._head = target.model.get_output_embeddings()
        hidden = torch.empty((0, model.encoder.fc.in_features), dtype=target.dtype, device=target.device)
        # A token's distance to the tokens that it reads is at most the window in these models, not less.
        windows = [replace(each, window=each.window and each.window + 1) for each in windows_of(config)]
        super().__init__(
            [_shape_of(layer.self_attn) for layer in model.layers],
            hidden,
            target,
            windows=windows,
            rankings=self._block - 1,
            drafted=self._block,
        )
        self._kinds = list(config.layer_types)

    def _extent(self, rows: int, end: int) -> int:
        return super()._extent(rows, end + self._block)

    def _words(self, tokens: list[int], size: int) -> list[int]:
        """Return the places of the accepted tokens, padded to ``size``, and of the block, and the block's tokens."""
        start, padding = self.length + len(tokens), size - len(tokens)
        behind = start + self._block  # where padding is written
        places = [*range(self.length, start), *range(behind, behind + padding), *range(start, behind)]
        return [*places, tokens[-1], *[self._mask_token] * (self._block - 1)]

    def _rank_last(self, hidden: torch.Tensor, extent: int, words: torch.Tensor) -> TopTokens:
        places, noise = words.split([len(words) - self._block, self._block])
        masks = self._masks.block_mask(places[-self._block :], extent)
        states = self._model(
            noise_embeds=self._embed(noise[None]),
            context_hidden_states=hidden[None],
            position_ids=places[None],
            attention_mask=masks if isinstance(masks, dict) else dict.fromkeys(self._kinds, masks),
            past_key_values=CacheRows(self._cache.storage, places, extent, masks).cache,
        ).last_hidden_state[0, 1:]
        return topk_tokens(self._head(states), TOKENS_PER_RANKING)


def without_norm(embedding: Any) -> Any:
    """Return token embeddings without the norm that some models apply to them."""
    if not hasattr(embedding, "embed_norm"):
        return embedding
    bare = copy.copy(embedding)  # shares the parameters
    bare._modules = {**embedding._modules, "embed_norm": torch.nn.Identity()}
    return bare


def _shape_of(attention: Any) -> LayerShape:
    weight = attention.k_proj.weight
    keys = HeadShape(len(weight) // attention.head_dim, attention.head_dim, weight.dtype, weight.device)
    return LayerShape(keys, keys)


def dflash_drafter(model: Any, target: Target, gate: Gate | None = None) -> BlockDrafter:
    """Return a drafter for a target with a DFlash model."""
    columns, passes = target.watch_hidden(list(model.config.target_layer_ids)), DFlashPasses(model, target)
    return BlockDrafter(passes, Calibration(None, passes.rankings), columns, source=SourceId.DRAFTER, gate=gate)


def load_dflash(published: PublishedDrafter, target: Target) -> Any:
    """Load a DFlash model; raise HeadsError if it does not fit the target, FamilyError if transformers is too old."""
    from transformers import AutoModel

    try:
        import transformers.cache_utils as library

        library.DFlashCache  # noqa: B018
    except AttributeError:
        raise FamilyError("DFlash drafters need transformers 5.23 or newer: update it") from None
    model = published.pretrained(AutoModel)
    published.require_width(int(model.config.hidden_size), target)
    layers, number = list(model.config.target_layer_ids), int(target.config.num_hidden_layers)
    if not layers or max(layers) >= number:
        raise HeadsError(
            f"drafter {published.name} reads layers {layers}, and this model has {number}: name a drafter of this model"
        )
    if not 0 <= (mask := int(model.config.mask_token_id)) < target.vocabulary:
        raise HeadsError(
            f"drafter {published.name} reads token {mask} in place of drafts, and this model has tokens 0 to "
            f"{target.vocabulary - 1}: name a drafter of this model"
        )
    _fuse_norms(model)
    return model.to(target.device, target.dtype).requires_grad_(False).eval()


def _fuse_norms(model: Any) -> None:
    """Replace RMSNorms of transformers, which take six kernels each, by norms of one kernel with the same weights."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            epsilon = epsilon_of(norm) if type(norm).__name__.endswith("RMSNorm") else None
            if epsilon is not None:
                fused = Norm(len(norm.weight), epsilon)
                fused.weight = norm.weight
                setattr(module, name, fused)
