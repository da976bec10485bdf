"""Tiny random checkpoints of published drafter architectures, for a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from tests.support.families import SHAPE, VOCABULARY, random_model

DRAFTED = 40
"""Size of a tiny EAGLE-3 drafter's draft vocabulary."""
HEADS, KEY_HEADS, HEAD, MLP = 4, 2, 8, 48


def let_all_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow configurations whose layers all read the keys and values of others, which transformers 5.23 rejects."""
    modes = Gemma4TextConfig.kv_sharing_modes.fget  # type: ignore[attr-defined]

    def every(config: Any) -> Any:
        shares_all = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if shares_all else modes(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(every))


def six_layers(kind: str = "Llama") -> PreTrainedModel:
    torch.manual_seed(1)
    return random_model(kind, num_hidden_layers=6)


def few_words(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model say a few of its words only, so that some drafts are accepted by chance."""
    with torch.no_grad():
        head: Any = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())
        head.weight[3:] *= 0.1
    return model


def eagle3(folder: Path, model: PreTrainedModel, *, speculators: bool = False, **changes: Any) -> Path:
    """Write an EAGLE-3 checkpoint in the original format, or in the format of vLLM's speculators."""
    torch.manual_seed(5)
    width = int(model.config.get_text_config().hidden_size)
    layer = {
        "hidden_size": width, "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, 2 * width), "self_attn.k_proj": (KEY_HEADS * HEAD, 2 * width),
        "self_attn.v_proj": (KEY_HEADS * HEAD, 2 * width), "self_attn.o_proj": (width, HEADS * HEAD),
        "mlp.gate_proj": (MLP, width), "mlp.up_proj": (MLP, width), "mlp.down_proj": (width, MLP),
    }  # fmt: skip
    prefix = "layers.0" if speculators else "midlayer"
    tensors = {f"{prefix}.{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = 1 + 0.1 * torch.randn(width)
    tensors["norm.weight"] = 1 + 0.1 * torch.randn(width)
    tensors["fc.weight"], tensors["lm_head.weight"] = torch.randn(width, 3 * width) * 0.3, torch.randn(DRAFTED, width)
    ids = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFTED)
    tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), ids)
    settings: dict[str, Any] = {"draft_vocab_size": DRAFTED, **changes}
    embedding: Any = model.get_input_embeddings()
    if speculators:
        tensors["embed_tokens.weight"] = embedding.weight.detach().clone()
        settings |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        settings |= {"transformer_layer_config": layer, "norm_before_residual": True}
        settings |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    else:
        settings |= {**layer, "architectures": ["LlamaForCausalLMEagle3"]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    if speculators:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def dflash(folder: Path, model: PreTrainedModel, **changes: Any) -> Path:
    """Write a DFlash checkpoint in the layout of transformers."""
    text = model.config.get_text_config()
    torch.manual_seed(6)
    config = MuseGlimmerAssistantConfig(
        **SHAPE
        | {"hidden_size": text.hidden_size, "block_size": 5, "mask_token_id": 2, "target_layer_ids": [0, 2], **changes}
    )
    MuseGlimmerAssistantModel(config).eval().save_pretrained(folder)
    return folder


def assistant(folder: Path, model: PreTrainedModel, **changes: Any) -> Path:
    """Write an assistant of a Gemma 4 model."""
    text = model.config.get_text_config()
    torch.manual_seed(7)
    own = text.to_dict() | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    own |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    own["use_double_wide_mlp"] = False
    per_layer = own.get("per_layer_config") or {}
    own["per_layer_config"] = {place: changed for place, changed in per_layer.items() if int(place) < 2}
    config = Gemma4AssistantConfig(text_config=own, backbone_hidden_size=text.hidden_size, **changes)
    made = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight[3:] *= 0.1  # favours three tokens, so that some drafts are accepted by chance
    made.save_pretrained(folder)
    return folder
