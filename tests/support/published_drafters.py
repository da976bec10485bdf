"""Tiny random checkpoints of published drafter architectures for a target, and parts of slow reference code."""

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
HEADS, KEY_HEADS, HEAD, MLP, RANK = 4, 2, 8, 48, 6


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
    """Make a model favor three tokens, so that some drafts are accepted by chance; return the model."""
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


def block_drafter(
    folder: Path,
    model: PreTrainedModel,
    *,
    markov: str = "",
    speculators: bool = False,
    drafted: int | None = None,
    confidence: bool = True,
    **changes: Any,
) -> Path:
    """Write a DFlash checkpoint in its authors' format or that of vLLM's speculators.

    With a kind of ``markov`` head, write a DSpark checkpoint. ``drafted`` is the size of its own vocabulary, if any.
    """
    torch.manual_seed(8)
    width = int(model.config.get_text_config().hidden_size)
    tensors = _block_layers(width) | _markov_tensors(markov, drafted or VOCABULARY, width, confidence=confidence)
    if drafted:
        ids = torch.randperm(VOCABULARY)[:drafted].sort().values
        tensors |= {"d2t": ids - torch.arange(drafted), "t2d": torch.isin(torch.arange(VOCABULARY), ids)}
        tensors["lm_head.weight"] = torch.randn(drafted, width) * 0.3
    elif markov and not speculators:
        modules: dict[str, Any] = {
            "embed_tokens": model.get_input_embeddings(),
            "lm_head": model.get_output_embeddings(),
        }
        tensors |= {f"{name}.weight": module.weight.detach().clone() for name, module in modules.items()}
    settings: dict[str, Any] = {"block_size": 5}
    if markov:
        settings |= {"markov_rank": RANK, "markov_head_type": markov, "enable_confidence_head": confidence}
    layer = SHAPE | {"hidden_size": width, "rms_norm_eps": 1e-6, "model_type": "qwen3", "num_target_layers": 6}
    if speculators:
        kind = "dspark" if markov else "dflash"
        settings |= {"speculators_model_type": kind, "architectures": [f"{kind}Speculator"], "mask_token_id": 2}
        settings |= {"transformer_layer_config": layer, "aux_hidden_state_layer_ids": [1, 3]}
    elif markov:
        settings |= {**layer, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 2], "mask_token_id": 2}
    else:
        settings |= {**layer, "architectures": ["DFlashDraftModel"]}
        settings["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [0, 2]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def _block_layers(width: int) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, width), "self_attn.k_proj": (KEY_HEADS * HEAD, width),
        "self_attn.v_proj": (KEY_HEADS * HEAD, width), "self_attn.o_proj": (width, HEADS * HEAD),
        "mlp.gate_proj": (MLP, width), "mlp.up_proj": (MLP, width), "mlp.down_proj": (width, MLP),
    }  # fmt: skip
    norms = {f"self_attn.{name}_norm": HEAD for name in "qk"}
    norms |= {"input_layernorm": width, "post_attention_layernorm": width}
    tensors = {"fc.weight": torch.randn(width, 2 * width) * 0.2}
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(width) for name in ("norm", "hidden_norm")}
    for prefix in (f"layers.{number}" for number in range(SHAPE["num_hidden_layers"])):
        tensors |= {f"{prefix}.{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
        tensors |= {f"{prefix}.{name}.weight": 1 + 0.1 * torch.randn(size) for name, size in norms.items()}
    return tensors


def _markov_tensors(kind: str, drafted: int, width: int, *, confidence: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a Markov head and of a confidence head; none without a ``kind``."""
    if not kind:
        return {}
    tensors = {"markov_w1.weight": torch.randn(VOCABULARY, RANK), "markov_w2.weight": torch.randn(drafted, RANK)}
    if kind == "gated":
        tensors |= {"gate_proj.weight": torch.randn(RANK, width + RANK) * 0.3, "gate_proj.bias": torch.randn(RANK)}
    elif kind == "rnn":
        tensors["joint_proj.weight"] = torch.randn(3 * RANK, 2 * RANK + width) * 0.3
        tensors["joint_proj.bias"] = torch.randn(3 * RANK)
    named = {f"markov_head.{name}": tensor for name, tensor in tensors.items()}
    if confidence:
        named["confidence_head.proj.weight"] = torch.randn(1, width + RANK) * 0.1
        named["confidence_head.proj.bias"] = torch.randn(1)
    return named


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


def normed(states: Any, weight: Any) -> torch.Tensor:
    """Apply an RMSNorm."""
    found: torch.Tensor = states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    return found


def turned(states: torch.Tensor, positions: range) -> torch.Tensor:
    """Apply rotary positions to states ``[tokens, heads, width]``."""
    angles = torch.tensor(positions)[:, None, None] * 10_000.0 ** (-torch.arange(4) / 4)
    first, second = states[..., :4], states[..., 4:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
