"""The hybrid demo model: the layers of Qwen3.5 with its multi-token prediction (MTP), in a few million parameters.

Three layers of four keep a state by the gated delta rule (Yang et al., "Gated Delta Networks", 2024), the fourth
attends. The MTP layer reads a position's last hidden state and the token after it, and predicts the token after that
(DeepSeek-AI, "DeepSeek-V3", 2024). It is trained with the model, and hangs on it as ``model.mtp`` meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm

from hdtool.builders.demo.recipe import Recipe

AHEAD_WEIGHT = 0.3
"""Weight of the MTP layer's loss beside the model's own."""

MTP_SETTINGS: dict[str, Any] = {
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Settings of the MTP layer: two that transformers reads, and two that Qwen3.5's own configurations have."""

SAVED_NAMES = {
    "mtp.mtp_block.": "mtp.layers.0.",
    "mtp.enorm.": "mtp.pre_fc_norm_embedding.",
    "mtp.hnorm.": "mtp.pre_fc_norm_hidden.",
    "mtp.eh_proj.": "mtp.fc.",
    "mtp.post_norm.": "mtp.norm.",
}
"""Beginnings of names: transformers' own, and those in the checkpoints of Qwen3.5."""


def new_hybrid(recipe: Recipe, vocabulary: int, special: dict[str, Any]) -> PreTrainedModel:
    rotating = recipe.width // recipe.heads // 4
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.width // recipe.heads,
        linear_num_key_heads=recipe.kv_heads,
        linear_num_value_heads=recipe.heads,
        linear_key_head_dim=recipe.width // recipe.heads,
        linear_value_head_dim=recipe.width // recipe.heads,
        max_position_embeddings=recipe.context,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [(rotating // 2 + 2 - axis) // 3 for axis in range(3)],
        },
        tie_word_embeddings=True,
        **special,
        **MTP_SETTINGS,
    )
    model = Qwen3_5ForCausalLM(config)
    model.mtp = MtpLayer(config.get_mtp_config(), Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 0)
    model.mtp.apply(model._init_weights)
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            set_time_steps(module.dt_bias)
    return model


def set_time_steps(bias: torch.Tensor) -> None:
    """Time steps of 0.001 to 0.1, as Mamba draws them: by transformers' bias of 1, most states forget in one token."""
    steps = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))


def ahead(model: PreTrainedModel, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits for the token after ``following``, the tokens that come after those of the hidden states."""
    positions = torch.arange(1, following.shape[1] + 1, device=following.device)[None]
    embedded = model.model.embed_tokens(following)
    rotary = model.model.rotary_emb(embedded, positions)
    layer: Any = model.mtp
    logits: torch.Tensor = model.lm_head(layer(embedded, hidden, rotary, None, positions, None))
    return logits


def hybrid_loss(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token, and a share of that of the token after it."""
    no_masks = {"full_attention": None, "linear_attention": None}  # given, nothing waits for a GPU to make them
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch[:, :-1], attention_mask=no_masks, use_cache=False).last_hidden_state
        logits, later = model.lm_head(hidden), ahead(model, hidden[:, :-1], batch[:, 1:-1])
    own = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return own + AHEAD_WEIGHT * cross_entropy(later.float().flatten(0, 1), batch[:, 2:].flatten())


@torch.no_grad()
def agreements(model: PreTrainedModel, ids: torch.Tensor) -> tuple[int, int]:
    """At how many positions of a text the MTP layer names the token that the model then prefers, and of how many."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    drafted, own = ahead(model, hidden[:, :-1], ids[:, 1:-1]).argmax(-1), model.lm_head(hidden[:, 1:]).argmax(-1)
    return int((drafted == own).sum()), own.numel()


def saved_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights under the names in which Qwen3.5's checkpoints hold them."""

    def saved_name(name: str) -> str:
        return next((new + name[len(old) :] for old, new in SAVED_NAMES.items() if name.startswith(old)), name)

    return {saved_name(name): value for name, value in model.state_dict().items()}
