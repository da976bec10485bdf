"""DFlash drafters, which predict a block of masked tokens in one pass, like a diffusion model.

They read the outputs of some layers of the target. The drafter's model and KV cache come from transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import FamilyError, HeadsError, error_reason
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.drafters.trained.draft_passes import on_host
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.proposal import MAX_RANKINGS, TOKENS_PER_RANKING, Calibration
from hdtool.runtime.drafters.trained.sequential import BlockDrafter, Ranked

if TYPE_CHECKING:
    from hdtool.runtime.drafters.trained.proposal import PublishedDrafter
    from hdtool.runtime.target.target import Target


class DFlashDrafter(BlockDrafter):
    """Drafts for a target with a DFlash model."""

    source = SourceId.DRAFTER

    def __init__(self, model: Any, target: Target) -> None:
        self._model, self._device = model, target.device
        self._block = min(int(model.config.block_size), MAX_RANKINGS + 1)
        self._mask_token = int(model.config.mask_token_id)
        self._embed, self._head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        columns = target.watch_hidden(list(model.config.target_layer_ids))
        super().__init__(Calibration(None, self._block - 1), columns)

    def _restart(self) -> None:
        from transformers.cache_utils import DFlashCache

        self._cache = DFlashCache(config=self._model.config)
        self._cache.activate_past_recording()
        self._length = 0
        """Number of accepted positions read so far."""

    def _rank(self, hidden: torch.Tensor, tokens: list[int], max_nodes: int) -> Ranked:
        new = len(tokens)
        self._cache.set_previous_accepted_tokens(new)
        if self._length:
            self._cache.crop(-self._block)  # drop the block of the last draft
        noise = torch.tensor([[tokens[-1], *[self._mask_token] * (self._block - 1)]], device=self._device)
        positions = torch.arange(self._length, self._length + new + self._block, device=self._device)[None]
        self._length += new
        states = self._model(
            noise_embeds=self._noise(noise),
            context_hidden_states=hidden[None],
            position_ids=positions,
            attention_mask=None,
            past_key_values=self._cache,
        ).last_hidden_state[0, 1:]
        return on_host(topk_tokens(self._head(states), TOKENS_PER_RANKING))

    def _noise(self, ids: torch.Tensor) -> torch.Tensor:
        """Return token embeddings without the norm that some models apply to them."""
        norm = getattr(self._embed, "embed_norm", None)
        if norm is None:
            embeddings: torch.Tensor = self._embed(ids)
            return embeddings
        self._embed.embed_norm = torch.nn.Identity()
        try:
            embedded: torch.Tensor = self._embed(ids)
            return embedded
        finally:
            self._embed.embed_norm = norm


def load_dflash(published: PublishedDrafter, target: Target) -> Any:
    """Load a DFlash model; raise HeadsError if it does not fit the target, FamilyError if transformers is too old."""
    from transformers import AutoModel

    try:
        import transformers.cache_utils as library

        library.DFlashCache  # noqa: B018
    except AttributeError:
        raise FamilyError("DFlash drafters need transformers 5.23 or newer: update it") from None
    try:
        model: Any = AutoModel.from_pretrained(published.folder, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise HeadsError(
            f"drafter {published.name} cannot be loaded ({error_reason(error)}): name another one"
        ) from error
    width = int(target.config.hidden_size)
    if int(model.config.hidden_size) != width:
        raise HeadsError(
            f"drafter {published.name} is for a model of width {model.config.hidden_size}, and this one has {width}: "
            "name a drafter of this model"
        )
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
    return model.to(target.device, target.dtype).requires_grad_(False).eval()
