"""The target: a tree's logits are plain decoding's, on every family; others are refused with a reason."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from hdtool.data.errors import FamilyError, ModelError
from hdtool.runtime.core import tolerances
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.engines.proofs import tree_proof as checks
from hdtool.runtime.model.refusals import context_limit
from hdtool.runtime.model.transformers_internals import cache_argument
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.families import SHAPE, model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import generated, prompt_of


def test_the_cache_is_one_tensor_and_serves_the_next_conversation() -> None:
    one = OneSequence(Target(model_of("llama")))
    one.prefill(prompt_of(50), room=20)
    tensors = one.cache.storage.tensors
    assert len(tensors) == 1
    assert tensors[0].shape == (2 * 2, 1, 2, one.cache.capacity, 8)
    one.prefill(prompt_of(9), room=20)
    assert one.cache.storage.tensors[0] is tensors[0]


def test_layers_of_different_shape_share_a_tensor_each() -> None:
    """DeepSeek keeps a latent vector and, apart from it, what is turned by the position."""
    target = Target(model_of("deepseek_v3"))
    assert sorted(tensor.shape[-1] for tensor in target.allocate().storage.tensors) == [8, 16]


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    kept = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = getattr(transformers, f"{name}Config")(**{**kept, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Rwkv", {"attention_hidden_size": 32}, "takes no key-value cache"),
        ("XLNet", {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48}, "takes no key-value cache"),
    ],
)
def test_families_that_cannot_work_are_refused_with_the_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FamilyError, match=reason) as refusal:
        Target(tiny(name, **changes))
    assert "\n" not in str(refusal.value)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=97, d_model=32, num_layers=2, num_heads=4, d_ff=48, d_kv=8)
    with pytest.raises(FamilyError, match="encoder-decoder"):
        Target(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma2", "qwen3_moe", "gpt_neox"])
def test_a_model_that_ignores_masks_or_positions_verifies_chains_alone(
    family: str, ignored: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model_of(family)).to(dtype)  # type: ignore[arg-type]
    assert Target(model).takes_trees
    honest, usual = model.forward, copy.copy(model)

    def careless(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        **rest: Any,
    ) -> Any:
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        return honest(input_ids=input_ids, **cache_argument(usual, cache), **{**given, ignored: None}, **rest)

    monkeypatch.setattr(model, "forward", careless)
    assert not Target(model).takes_trees


@pytest.mark.parametrize("rounding, refused", [(0.0, True), (0.05, False)])
def test_low_precision_is_judged_by_the_rounding_of_the_model(
    rounding: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for SmolLM2-135M in bfloat16: its tree logits are off by 0.21 sigma, and by 3.4 if it ignores the mask."""
    monkeypatch.setattr(tolerances, "LOW_PRECISION_TOLERANCE", 1e-6)  # less than any rounding in 16 bits
    monkeypatch.setattr(checks, "measure_rounding", lambda *of: rounding)
    model = copy.deepcopy(model_of("llama")).to(torch.bfloat16)  # type: ignore[arg-type]
    assert Target(model).takes_trees != refused


def test_a_model_whose_code_fails_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")

    def broken(
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        **rest: Any,
    ) -> Any:
        raise RuntimeError("no kernel for this\nand a long story")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(FamilyError, match=r"no kernel for this\)"):
        Target(model)


@pytest.mark.parametrize(("number", "said"), [(torch.nan, "NaN"), (3e38, "values up to 3e+38")])
def test_damaged_weights_are_not_blamed_on_the_family(number: float, said: str) -> None:
    model = copy.deepcopy(model_of("llama"))
    model.get_parameter("model.layers.1.mlp.down_proj.weight").data[3] = number
    with pytest.raises(ModelError, match=f"is damaged: model.layers.1.mlp.down_proj.weight holds {re.escape(said)}:"):
        Target(model)


def test_a_longrope_answer_does_not_cross_the_switch() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    shape = {**SHAPE, "max_position_embeddings": 128, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(
        **shape, rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    )
    assert context_limit(config, prompt_length=64) == 64
    assert context_limit(config, prompt_length=65) == 128
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for length, room in ((40, 24), (70, 30)):
        prompt = prompt_of(length)
        expected = generated(model, prompt, room)
        steps = decode(Target(model), prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=room)
        assert [token for step in steps for token in step.tokens] == expected
