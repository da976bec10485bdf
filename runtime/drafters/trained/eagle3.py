"""EAGLE-3 drafters (Li et al., 2025): one decoder layer over the outputs of three layers of the target.

Checkpoints may have the format of the original implementation or of vLLM's speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hdtool.data.errors import HeadsError
from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.drafters.trained.draft_passes import DraftPasses, Rows
from hdtool.runtime.drafters.trained.drafter_layers import DrafterLayers
from hdtool.runtime.drafters.trained.module_parts import Norm, topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, PublishedDrafter
from hdtool.runtime.model.pass_inputs import FULL, AttentionWindow
from hdtool.runtime.program.model_families import LLAMA
from hdtool.runtime.program.model_parts import LayerParts, ModelParts

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

    @property
    def parts(self) -> LayerParts[nn.Module]:
        """The layer as the engines describe it; its first norms and their concatenation are the drafter's."""
        shape, attention, mlp = self.shape, self.self_attn, self.mlp
        return LayerParts(
            self,
            attention,
            (attention["q_proj"], attention["k_proj"], attention["v_proj"]),
            attention["o_proj"],
            (mlp["gate_proj"], mlp["up_proj"]),
            (mlp["down_proj"],),
            None,
            (None, None, self.post_attention_layernorm, None),
            (),
            shape.key_heads,
            shape.heads // shape.key_heads,
            shape.head,
            shape.epsilon,
            shape.head**-0.5,
            "silu",
            None,
        )

    def read(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states to which the layer adds, and what its attention reads."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return normed if self.shape.adds_normed else hidden, joined


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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


class EagleModule(DraftPasses):
    """An EAGLE-3 drafter that extends drafts by reading its own hidden states."""

    def __init__(self, drafter: Eagle3, target: Target) -> None:
        shape, like, layer = drafter.shape, drafter.fc.weight, drafter.layer
        keys = HeadShape(shape.key_heads, shape.head, like.dtype, like.device)
        embed = drafter.embed_tokens
        parts = ModelParts(
            drafter, drafter, embed, [layer.parts], drafter.rotary, None, drafter.lm_head, shape.epsilon, LLAMA
        )
        layers = DrafterLayers(parts, [AttentionWindow(FULL)])

        def run(tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
            if hidden.shape[-1] == drafter.fc.in_features:  # of the target's layers, not of the drafter
                hidden = drafter.fc(hidden)
            states, joined = layer.read(embed(tokens), hidden)
            return [layers.run(states, positions + 1, rows, normed=joined)]

        super().__init__(
            run,
            lambda hidden: topk_tokens(drafter.logits(hidden), TOKENS_PER_RANKING, drafter.token_ids),
            [LayerShape(keys, keys)],
            width=shape.width,
            read_width=3 * shape.target_width,
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
    published.require_width(shape.target_width, target)
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
