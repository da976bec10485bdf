"""EAGLE-3 drafters (Li et al., 2025): one decoder layer over the outputs of three layers of the target.

Checkpoints may have the format of the original implementation or of vLLM's speculators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape
from hdtool.runtime.drafters.trained.checkpoints import PublishedDrafter, renamed_parameter
from hdtool.runtime.drafters.trained.draft_passes import DraftPasses
from hdtool.runtime.drafters.trained.module_parts import CastingNorm, topk_tokens
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.model.pass_inputs import FULL, AttentionWindow, CacheRows
from hdtool.runtime.program.llama_like_families import LLAMA
from hdtool.runtime.program.model_parts import LayerParts, ModelParts

if TYPE_CHECKING:
    from hdtool.runtime.target.target import Target

RENAMED_PARAMETERS = {"midlayer.": "layer.", "layers.0.": "layer."}
"""Maps prefixes of tensor names in the two checkpoint formats to the prefixes used here."""
TARGET_IDS, OFFSETS = "t2d", "d2t"
"""Names of tensors in a checkpoint: a mask of the target's tokens that can be drafted, and for each draft token the
difference between the target's id and its own."""


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads each token's embedding concatenated with a hidden state."""

    def __init__(self, config: Any, embedding: int, *, adds_normed: bool) -> None:
        """``config`` is a ``LlamaConfig``; ``adds_normed`` says that the residual connection adds the normed state."""
        super().__init__()
        self._config, self._adds_normed = config, adds_normed
        width, epsilon = config.hidden_size, config.rms_norm_eps
        queries, keys = (
            number * config.head_dim for number in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.input_layernorm = CastingNorm(embedding, epsilon)
        self.hidden_norm = CastingNorm(width, epsilon)
        self.post_attention_layernorm = CastingNorm(width, epsilon)
        self.self_attn = _matmuls(
            q_proj=(embedding + width, queries),
            k_proj=(embedding + width, keys),
            v_proj=(embedding + width, keys),
            o_proj=(queries, width),
        )
        inner = config.intermediate_size
        self.mlp = _matmuls(gate_proj=(width, inner), up_proj=(width, inner), down_proj=(inner, width))

    @property
    def parts(self) -> LayerParts[nn.Module]:
        """The layer as the engines describe it, without the first norms and concatenation, which ``read`` computes."""
        config, attention, mlp = self._config, self.self_attn, self.mlp
        return LayerParts(
            layer=self,
            attention=attention,
            qkv=(attention["q_proj"], attention["k_proj"], attention["v_proj"]),
            out=attention["o_proj"],
            gate_up=(mlp["gate_proj"], mlp["up_proj"]),
            down=(mlp["down_proj"],),
            block_norms=(None, None, self.post_attention_layernorm, None),
            heads=config.num_key_value_heads,
            groups=config.num_attention_heads // config.num_key_value_heads,
            width=config.head_dim,
            epsilon=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            activation="silu",
        )

    def read(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states to which the layer adds its outputs, and the input of its attention."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return normed if self._adds_normed else hidden, joined


def _matmuls(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})


class Eagle3(nn.Module):
    """An EAGLE-3 drafter; it uses the target's token embeddings if the checkpoint has none."""

    def __init__(self, settings: dict[str, Any], embedding: int, target_width: int) -> None:
        """``settings`` are those of the checkpoint; ``embedding`` is the width of the target's token embeddings.

        ``target_width`` is that of the target's hidden states.
        """
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        layer = settings.get("transformer_layer_config") or settings
        self.config: Any = LlamaConfig.from_dict({**layer, "model_type": "llama"})
        config = self.config
        width, vocabulary = config.hidden_size, int(settings.get("draft_vocab_size") or config.vocab_size)
        self.fc = nn.Linear(3 * target_width, width, bias=False)
        self.layer = EagleLayer(config, embedding, adds_normed=bool(settings.get("norm_before_residual", False)))
        self.norm = CastingNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.embed_tokens: Any = None
        self.token_ids: torch.Tensor | None = None
        """The target's id of each draft token; None if all tokens can be drafted."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


class EagleModule(DraftPasses):
    """An EAGLE-3 drafter that extends drafts by reading its own hidden states."""

    def __init__(self, drafter: Eagle3, target: Target) -> None:
        config, like, layer = drafter.config, drafter.fc.weight, drafter.layer
        keys = HeadShape(config.num_key_value_heads, config.head_dim, like.dtype, like.device)
        embed = drafter.embed_tokens
        parts = ModelParts(
            drafter, drafter, embed, [layer.parts], drafter.rotary, None, drafter.lm_head, config.rms_norm_eps, LLAMA
        )
        layers = target.drafter_layers(parts, [AttentionWindow(FULL)])

        def run(
            tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, rows: CacheRows
        ) -> list[torch.Tensor]:
            if hidden.shape[-1] == drafter.fc.in_features:  # of the target's layers, not of the drafter
                hidden = drafter.fc(hidden)
            states, joined = layer.read(embed(tokens), hidden)
            return [layers.run(states, positions + 1, rows, normed=joined)]

        super().__init__(
            run,
            lambda hidden: topk_tokens(drafter.logits(hidden), TOKENS_PER_RANKING, drafter.token_ids),
            [LayerShape(keys, keys)],
            width=drafter.fc.out_features,
            read_width=drafter.fc.in_features,
            target=target,
        )


def layers_of(settings: dict[str, Any], number: int) -> list[int]:
    """Return the indices of the target layers whose outputs a drafter reads; checkpoints list each index plus 1."""
    named = settings.get("eagle_aux_hidden_state_layer_ids") or (2, number // 2, number - 3)
    return [int(layer) - 1 for layer in named]


def load_eagle3(published: PublishedDrafter, target: Target) -> tuple[Eagle3, list[int]]:
    """Load an EAGLE-3 drafter; return it and the indices of the target's layers that it reads.

    Raise HeadsError if the drafter cannot be loaded or does not fit the target.
    """
    settings, tensors = published.settings, published.tensors()
    target_width = int(target.config.hidden_size)
    if "fc.weight" in tensors:
        published.require_width(tensors["fc.weight"].shape[1] // 3, target)
    ids = tensors.pop(TARGET_IDS, None)
    if ids is not None and len(ids) > target.vocabulary:
        published.require_vocabulary(len(ids), target)
    offsets = tensors.pop(OFFSETS, None)
    embeddings: Any = target.model.get_input_embeddings()
    drafter = Eagle3(settings, int(embeddings.weight.shape[1]), target_width)
    renamed = {renamed_parameter(name, RENAMED_PARAMETERS): tensor for name, tensor in tensors.items()}
    embedding = renamed.pop("embed_tokens.weight", None)
    published.fill(drafter, renamed)
    drafter.to(target.device, target.dtype).requires_grad_(False).eval()
    if embedding is None:
        drafter.embed_tokens = embeddings
    else:
        drafter.embed_tokens = nn.Embedding.from_pretrained(embedding.to(target.device, target.dtype))
    drafter.token_ids = published.token_ids(offsets, drafter.lm_head.out_features, target)
    return drafter, layers_of(settings, int(target.config.num_hidden_layers))
