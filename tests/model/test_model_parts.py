"""Models with the modules of Llama and other code are the library's, even if rounding or a short context hides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PreTrainedModel

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.model.transformers_internals import attention_by
from hdtool.runtime.program.model_parts import EngineSupport, model_parts
from hdtool.runtime.target.target import Target
from tests.support.families import WINDOW, random_model
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.rehearsed import direct

ANY: EngineSupport[torch.nn.Linear] = EngineSupport(
    lambda one: type(one) is torch.nn.Linear, lambda one: True, lambda one: True
)
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""Ministral 3 scales queries after the original length alone."""
OTHERS: dict[str, dict[str, Any]] = {
    "Ministral3": {"rope_parameters": SCALED, "sliding_window": None},
    "Granite": {"residual_multiplier": 0.97, "logits_scaling": 1.06},
    "SmolLM3": {"initializer_range": 0.02},
}
DESCRIBED = {"Granite", "SmolLM3"}
"""Those that the fused pass has a description of."""
KNOWN: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Ministral": {"sliding_window": WINDOW},
    "Cwm": {"sliding_window": WINDOW},
    "SeedOss": {},
}


def model_of(name: str, changes: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = random_model(name, **changes).eval()
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_other_code_is_not_taken_for_llamas(name: str) -> None:
    model = model_of(name, OTHERS[name])
    assert model_parts(model, ANY) is None
    target = Target(model.to(torch.bfloat16), direct)  # type: ignore[arg-type]
    assert target.captures and target.is_fused == (name in DESCRIBED)


@pytest.mark.parametrize("name", KNOWN)
def test_other_names_of_the_same_code_are(name: str) -> None:
    model = model_of(name, KNOWN[name])
    assert model_parts(model, ANY)
    assert Target(model, direct).is_fused


@pytest.mark.parametrize("length", [20, 90])
@pytest.mark.parametrize("name", OTHERS)
def test_their_captured_steps_have_the_plain_logits(name: str, length: int) -> None:
    model, context = model_of(name, OTHERS[name]), prompt_of(length)
    one = OneSequence(Target(model, direct))
    one.prefill(context)
    for token in (5, 8):
        context.append(token)
        assert_same_logits(one.verify(DraftTree.bare(token))[0], plain_logits(model, context))
        one.commit()


def test_each_part_of_a_model_gets_its_own_attention_back() -> None:
    config = LlavaConfig(text_config=LlamaConfig(), vision_config=CLIPVisionConfig())
    config._attn_implementation = "sdpa"
    config.vision_config._attn_implementation = "eager"  # type: ignore[union-attr]
    with attention_by(cast(PreTrainedModel, SimpleNamespace(config=config)), "another", print):
        assert config.text_config._attn_implementation == "another"  # type: ignore[union-attr]
    found = [one._attn_implementation for one in (config, config.text_config, config.vision_config)]  # type: ignore[union-attr]
    assert found == ["sdpa", "sdpa", "eager"]
