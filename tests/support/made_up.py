"""Made-up model unlike Llama, whose modules pass for those of a package of transformers, and its description.

Norms follow attention and MLP, each head has an output gate, the later half of the layers reads the keys and values of
earlier ones, and every other layer has a mixture of experts in place of its MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Linear, Module, ModuleList
from transformers import LlamaForCausalLM, LlamaModel, MixtralConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter

from hdtool.runtime.program.llama_like_families import (
    EXPERT_SETTINGS,
    POST_NORMS,
    PROJECTIONS,
    AttentionKind,
    Family,
    LayerKind,
)
from hdtool.runtime.program.mixer_parts import ExpertKind
from tests.support.families import SHAPE

PACKAGE = "made_up"
ROW = Family(
    layer=LayerKind(norms=POST_NORMS),
    attention=AttentionKind(
        gates_heads=True,
        projections=lambda attention: PROJECTIONS[: 3 if attention.own_keys else 1],
        shared_kv_attribute="own_keys",
    ),
    experts=ExpertKind("MadeUpMixture", "MadeUpRouter"),
    attributes=frozenset({"own_keys"}),
    settings=EXPERT_SETTINGS,
)
LAYERS = 4


class MadeUpConfig(MixtralConfig):
    model_type = "made_up"
    attention_bias = mlp_bias = False


class MadeUpNorm(LlamaRMSNorm):
    pass


class MadeUpRotary(LlamaRotaryEmbedding):
    pass


class MadeUpMLP(LlamaMLP):
    pass


class MadeUpRouter(MixtralTopKRouter):
    pass


class MadeUpMixture(MixtralSparseMoeBlock):
    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.gate = MadeUpRouter(config)  # type: ignore[no-untyped-call]


class MadeUpAttention(Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.layer_type = config, layer_idx, "full_attention"
        self.head_dim, self.scaling, self.is_causal = config.head_dim, config.head_dim**-0.5, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.own_keys = layer_idx < config.num_hidden_layers // 2
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj, self.o_proj = Linear(config.hidden_size, 2 * queries), Linear(queries, config.hidden_size)
        if self.own_keys:
            self.k_proj, self.v_proj = (Linear(config.hidden_size, keys, bias=False) for _ in range(2))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        shared_kv_states: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        both = self.q_proj(hidden_states).view(*shape[:-1], 2 * self.head_dim)
        queries, gates = (part.transpose(1, 2) for part in both.chunk(2, dim=-1))
        if self.own_keys:
            keys, values = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
            queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
            if past_key_values is not None:
                keys, values = past_key_values.update(keys, values, self.layer_idx)
            shared_kv_states[self.layer_type] = keys, values
        else:
            queries, _ = apply_rotary_pos_emb(queries, queries, *position_embeddings)
            keys, values = shared_kv_states[self.layer_type]
        attend = sdpa_attention_forward if "sdpa" in self.config._attn_implementation else eager_attention_forward
        mixed, _ = attend(self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling)
        gated = mixed * gates.transpose(1, 2).sigmoid()
        return self.o_proj(gated.flatten(2)), None


class MadeUpLayer(Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = MadeUpAttention(config, layer_idx)
        self.mlp = MadeUpMixture(config) if layer_idx % 2 else MadeUpMLP(config)  # type: ignore[no-untyped-call]
        self.post_attention_layernorm = MadeUpNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = MadeUpNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> torch.Tensor:
        mixed, _ = self.self_attn(hidden_states, past_key_values=past_key_values, **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(mixed)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))  # type: ignore[no-any-return]


class MadeUpModel(LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = ModuleList([MadeUpLayer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = MadeUpNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MadeUpRotary(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs, shared_kv_states={})


class MadeUpForCausalLM(LlamaForCausalLM):
    config_class = MadeUpConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MadeUpModel(config)
        self.post_init()  # type: ignore[no-untyped-call]


for made_up in (
    *(MadeUpConfig, MadeUpNorm, MadeUpRotary, MadeUpMLP, MadeUpRouter, MadeUpMixture, MadeUpAttention, MadeUpLayer),
    *(MadeUpModel, MadeUpForCausalLM),
):
    made_up.__module__ = f"transformers.models.{PACKAGE}.modeling_{PACKAGE}"


def made_up_model() -> Any:
    """Create a tiny random model."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": LAYERS, "num_local_experts": 4}
    model: Any = MadeUpForCausalLM(MadeUpConfig(**shape))
    model.eval()
    for weight in model.parameters():
        weight.data = torch.rand_like(weight) + 0.5 if weight.dim() == 1 else 0.3 * torch.randn_like(weight)
    return model
