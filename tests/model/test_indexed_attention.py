"""Indexed attention: keys of an indexer are kept, moved and copied with keys and values; trees are exact."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hdtool.runtime.caches.library_views import KVLayer
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request
from hdtool.runtime.core.session import Session
from hdtool.runtime.target.target import Target
from tests.support.decoding import all_answered, answered, output_tokens, run
from tests.support.families import SHAPE, VOCABULARY
from tests.support.oracle import generated, prompt_of
from tests.support.rehearsed import direct
from tests.support.trees import WrongDrafter

SELECTED = 16
"""Positions that an indexer selects: fewer than a prompt has."""
LATENT: dict[str, Any] = {
    **SHAPE,
    "pad_token_id": None,  # the embedding of padding is zero, for which all positions have the same score
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_topk": SELECTED,
    "index_head_dim": 16,
    "index_n_heads": 32,  # with few heads, several positions have the score of 0, and any of them may be selected
}
DENSE_FIRST: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SHARED: dict[str, Any] = {"indexer_types": ["full", "shared", "full"]}


@cache
def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if family == "MistralLarge4":
        text = {**LATENT, **DENSE_FIRST, "kv_source_layers": [0, 0, 2], "indexer_types": ["full", "full", "shared"]}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        parts: dict[str, Any] = {"text_config": text, "vision_config": {**vision, "model_type": "pixtral"}}
        model = AutoModelForImageTextToText.from_config(transformers.MistralLarge4Config(**parts))
    else:
        changes: dict[str, Any] = {
            "DeepseekV32": DENSE_FIRST,
            "GlmMoeDsa": DENSE_FIRST | SHARED,
            "HYV4": SHARED,
            "AXK2": {},
            "Dots3NoteText": {"layer_types": ["sliding_attention", "indexed_attention"] * 2, "sliding_window": 12},
        }[family]
        settings = {**LATENT, **changes}
        settings["num_hidden_layers"] = len(settings.get("layer_types", range(3)))
        model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    evaluated: PreTrainedModel = model.eval()
    return evaluated


EXACT = [
    "DeepseekV32",
    "GlmMoeDsa",
    *(pytest.param(family, marks=pytest.mark.long) for family in ("MistralLarge4", "AXK2", "HYV4", "Dots3NoteText")),
]


@pytest.mark.parametrize("family", EXACT)
def test_drafts_and_further_turns_change_no_answer(family: str) -> None:
    model = model_of(family)
    target, prompt = Target(model), prompt_of(40)
    expected = generated(model, prompt, 40)
    assert output_tokens(run(target, prompt, SamplingConfig(), 40)) == expected
    for seed in range(2):
        drafter = WrongDrafter(len(prompt), expected, VOCABULARY, seed)
        steps = run(target, prompt, SamplingConfig(), 40, drafter=drafter)
        assert output_tokens(steps) == expected and len(steps) < 36
    again = [*prompt, *expected[:20], *prompt_of(9)]
    expected = generated(model, again, 20)
    steps = run(target, again, SamplingConfig(), 20, drafter=WrongDrafter(len(again), expected, VOCABULARY, 5))
    assert output_tokens(steps) == expected and steps[0].cached_tokens >= 59


def test_an_answer_is_drawn_with_its_seed() -> None:
    model = model_of("DeepseekV32")
    target, prompt = Target(model), prompt_of(40)
    sampling = SamplingConfig(temperature=0.8, seed=4)
    expected = output_tokens(run(target, prompt, sampling))
    drafter = WrongDrafter(len(prompt), expected, VOCABULARY, 1)
    assert output_tokens(run(target, prompt, sampling, drafter=drafter)) == expected


@pytest.mark.parametrize("captured", [False, True])
def test_answers_in_a_batch_and_in_captured_steps(captured: bool) -> None:
    model = model_of("GlmMoeDsa")
    target = Target(model, direct) if captured else Target(model)
    assert target.captures == captured
    prompts = [prompt_of(length) for length in (25, 60, 33)]
    expected = [generated(model, prompt, 24) for prompt in prompts]
    requests = [
        Request(number, prompt, Sampler(SamplingConfig(), prompt), WrongDrafter(len(prompt), truth, VOCABULARY, number))
        for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True))
    ]
    assert all_answered(Session(target, target.allocate(3), max_new_tokens=24), requests) == expected
    alone = WrongDrafter(len(prompts[1]), expected[1], VOCABULARY, 7)
    assert output_tokens(run(target, prompts[1], SamplingConfig(), 24, drafter=alone)) == expected[1]


def test_keys_of_indexers_are_copied_with_a_kept_conversation() -> None:
    model = model_of("DeepseekV32")
    target, first, second = Target(model), prompt_of(40), prompt_of(41)
    session = Session[int](target, target.allocate(1), max_new_tokens=16, prefixes=PrefixCache(1 << 24))
    answer, _ = answered(session, first)
    answered(session, second)
    again = [*first, *answer, *prompt_of(5)]
    found, cached = answered(session, again)
    assert found == generated(model, again, 16) and cached >= 50


def test_answers_depend_on_where_the_keys_of_indexers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    update = KVLayer.update_indexer

    def misplaced(layer: KVLayer, keys: torch.Tensor) -> torch.Tensor:
        return update(layer, keys).roll(1, 1)

    model = model_of("DeepseekV32")
    target, prompt = Target(model), prompt_of(40)
    monkeypatch.setattr(KVLayer, "update_indexer", misplaced)
    assert output_tokens(run(target, prompt, SamplingConfig(), 40)) != generated(model, prompt, 40)
