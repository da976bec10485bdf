"""EAGLE-3 drafters (Li et al., 2025): one decoder layer over the outputs of three layers of the target.

Checkpoints may have the format of the original implementation or of vLLM's speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from hdtool.data.errors import HeadsError
from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.drafters.trained.draft_passes import DraftPasses
from hdtool.runtime.drafters.trained.module_parts import Norm, topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, PublishedDrafter

if TYPE_CHECKING:
    from hdtool.runtime.target.target import Target

RENAMED_PARAMETERS = {"midlayer.": "layer.", "layers.0.": "layer."}
"""Maps prefixes of tensor names in the two checkpoint formats to the prefixes used here."""
TARGET_IDS, OFFSETS = "t2d", "d2t"
"""Names of tensors in a checkpoint: a mask of the target's tokens that can be drafted, and for each draft token the
difference between the target's id and its own."""


@dataclass(frozen=True)
class EagleShape:
    width: int
    target_width: int
    embedding: int
    mlp: int
    heads: int
    key_heads: int
    head: int
    epsilon: float
    vocabulary: int
    """Number of tokens that the drafter can draft."""
    adds_normed: bool = False
    """True if the residual connection adds the normed hidden state."""

    @classmethod
    def of(cls, settings: dict[str, Any], target: Target, target_width: int) -> EagleShape:
        """Return the shape given by a checkpoint's configuration."""
        layer = settings.get("transformer_layer_config") or settings
        width, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        embeddings: Any = target.model.get_input_embeddings()
        return cls(
            width,
            target_width,
            int(embeddings.weight.shape[1]),
            int(layer["intermediate_size"]),
            heads,
            int(layer.get("num_key_value_heads") or heads),
            int(layer.get("head_dim") or width // heads),
            float(layer.get("rms_norm_eps", 1e-6)),
            int(settings.get("draft_vocab_size") or layer["vocab_size"]),
            bool(settings.get("norm_before_residual", False)),
        )


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads each token's embedding concatenated with a hidden state."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        width, both = shape.width, shape.embedding + shape.width
        self.input_layernorm = Norm(shape.embedding, shape.epsilon)
        self.hidden_norm = Norm(width, shape.epsilon)
        self.post_attention_layernorm = Norm(width, shape.epsilon)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(both, shape.heads * shape.head, bias=False),
                "k_proj": nn.Linear(both, shape.key_heads * shape.head, bias=False),
                "v_proj": nn.Linear(both, shape.key_heads * shape.head, bias=False),
                "o_proj": nn.Linear(shape.heads * shape.head, width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, shape.mlp, bias=False),
                "up_proj": nn.Linear(width, shape.mlp, bias=False),
                "down_proj": nn.Linear(shape.mlp, width, bias=False),
            }
        )

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.shape.adds_normed else hidden
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        parts = [
            self.self_attn[name](joined).unflatten(-1, (-1, self.shape.head)) for name in ("q_proj", "k_proj", "v_proj")
        ]
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        keys, values = cache.update(_rotated(keys, rotary), values, 0)
        groups = self.shape.heads // self.shape.key_heads
        seen = functional.scaled_dot_product_attention(
            _rotated(queries, rotary),
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
        )
        hidden = residual + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(hidden)
        inner = functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        output: torch.Tensor = hidden + self.mlp["down_proj"](inner)
        return output


class Eagle3(nn.Module):
    """An EAGLE-3 drafter; it uses the target's token embeddings if the checkpoint has none."""

    def __init__(self, shape: EagleShape, rotary: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.target_width, shape.width, bias=False)
        self.layer = EagleLayer(shape)
        self.norm = Norm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.rotary = rotary
        self.embed_tokens: Any = None
        self.token_ids: torch.Tensor | None = None
        """The target's id of each draft token; None if all tokens can be drafted."""

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the hidden state after each token, given the hidden states before the tokens and their positions.

        ``hidden`` holds the outputs of the target's three layers, or the drafter's own hidden states.
        """
        if hidden.shape[-1] == self.fc.in_features:
            hidden = self.fc(hidden)
        return [self.layer(self.embed_tokens(tokens), hidden, self.rotary(hidden, positions + 1), cache, mask)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


class EagleModule(DraftPasses):
    """An EAGLE-3 drafter that extends drafts by reading its own hidden states."""

    def __init__(self, drafter: Eagle3, target: Target) -> None:
        shape, like = drafter.shape, drafter.fc.weight
        keys = HeadShape(shape.key_heads, shape.head, like.dtype, like.device)
        super().__init__(
            drafter,
            lambda hidden: topk_tokens(drafter.logits(hidden), TOKENS_PER_RANKING, drafter.token_ids),
            [LayerShape(keys, keys)],
            width=shape.width,
            read_width=3 * shape.target_width,
            window=None,
            target=target,
        )


def layers_of(settings: dict[str, Any], number: int) -> list[int]:
    """Return the indices of the target layers whose outputs a drafter reads; checkpoints list each index plus 1."""
    named = settings.get("eagle_aux_hidden_state_layer_ids") or (2, number // 2, number - 3)
    return [int(layer) - 1 for layer in named]


def load_eagle3(published: PublishedDrafter, target: Target) -> tuple[Eagle3, list[int]]:
    """Load an EAGLE-3 drafter; return it and the indices of the target's layers that it reads.

    Raise HeadsError if the drafter does not fit the target.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings, tensors = published.settings, published.tensors()
    width = int(target.config.hidden_size)
    joined = tensors.get("fc.weight", torch.empty(0, 3 * width))
    shape = EagleShape.of(settings, target, joined.shape[1] // 3)
    if shape.target_width != width:
        raise HeadsError(
            f"drafter {published.name} is for a model of width {shape.target_width}, and this one has {width}: "
            "name a drafter of this model"
        )
    ids = tensors.pop(TARGET_IDS, None)
    if ids is not None and len(ids) > target.vocabulary:
        raise HeadsError(
            f"drafter {published.name} is for a model of {len(ids)} tokens, and this one has {target.vocabulary}: "
            "name a drafter of this model"
        )
    offsets = tensors.pop(OFFSETS, None)
    layer = settings.get("transformer_layer_config") or settings
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict({**layer, "model_type": "llama"}))
    drafter = Eagle3(shape, rotary)
    renamed = {_renamed(name): tensor for name, tensor in tensors.items()}
    embedding = renamed.pop("embed_tokens.weight", None)
    published.fill(drafter, renamed)
    drafter.to(target.device, target.dtype).requires_grad_(False).eval()
    if embedding is None:
        drafter.embed_tokens = target.model.get_input_embeddings()
    else:
        drafter.embed_tokens = nn.Embedding.from_pretrained(embedding.to(target.device, target.dtype))
    if offsets is not None:
        drafter.token_ids = token_ids = (torch.arange(len(offsets)) + offsets).to(target.device)
        if len(offsets) != shape.vocabulary or not ((token_ids >= 0) & (token_ids < target.vocabulary)).all():
            raise HeadsError(f"drafter {published.name} drafts tokens that this model does not have: name another one")
    return drafter, layers_of(settings, int(target.config.num_hidden_layers))


def _renamed(name: str) -> str:
    for theirs, ours in RENAMED_PARAMETERS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _rotated(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (part[:, None] for part in rotary)
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos + turned * sin
