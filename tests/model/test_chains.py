"""Chains of drafts by replay, for models that cannot verify trees: exact, from caches that no pass changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedModel

from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.replay_slots import ReplayedCaches, bytes_of, tensors_of
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.stock import chain_passes
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, all_answered, answered, output_tokens, run
from tests.support.families import SHAPE, VOCABULARY, random_model
from tests.support.oracle import generated, prompt_of
from tests.support.trees import WrongDrafter

MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
STREAMS: dict[str, Any] = {"hc_mult": 2, "hc_sinkhorn_iters": 3}
INDEXED: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16}
SMALL: dict[str, Any] = {**SHAPE, "pad_token_id": None, "num_hidden_layers": 4}


def _of(name: str, without: tuple[str, ...] = (), **changes: Any) -> PreTrainedModel:
    return random_model(name, without, **{**SMALL, **changes})


def _glm5_next() -> PreTrainedModel:
    layers = ["linear_attention", "indexed_attention"] * 2
    linear = {"linear_head_dim": 16, "linear_num_heads": 4}
    experts = {**MIXTURE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    pooled = {**INDEXED, "index_kpool": 4, "index_topk": 16, "qk_rope_head_dim": 0, "num_key_value_heads": 4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    parts: dict[str, Any] = {
        "text_config": {**SMALL, **LATENT, **experts, **STREAMS, **linear, **pooled, "layer_types": layers},
        "vision_config": {**vision, "projection_intermediate_size": 16},
    }
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(transformers.Glm5NextConfig(**parts))
    return model


CHAINED: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": lambda: _of("Bloom", n_layer=2, n_head=4),
    "gpt_neo": lambda: _of(
        "GPTNeo",
        num_hidden_layers=2,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=24,
    ),
    "zaya": lambda: _of("Zaya"),
    "mpt": lambda: _of("Mpt", d_model=32, n_heads=4, n_layers=2),
    "falcon": lambda: _of("Falcon", without=("head_dim", "num_key_value_heads"), alibi=True),
    "deepseek_v4": lambda: _of(
        "DeepseekV4",
        **MIXTURE,
        **STREAMS,
        **INDEXED,
        num_key_value_heads=1,
        q_lora_rank=24,
        n_routed_experts=4,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        index_topk=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        num_hidden_layers=3,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    ),
    "minimax_m3": lambda: _of(
        "MiniMaxM3VLText",
        index_n_heads=2,
        index_head_dim=16,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        rotary_dim=8,
        index_block_size=8,
        index_topk_blocks=2,
        index_local_blocks=1,
    ),
    "inkling": lambda: _of(
        "InklingText",
        **MIXTURE,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=16,
        d_rel=4,
        rel_extent=32,
        n_routed_experts=4,
        n_shared_experts=1,
        local_layer_ids=[0, 2],
    ),
    "qwen4_exp": lambda: _of(
        "Qwen4ExpText",
        **MIXTURE,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "indexed_attention"] * 2,
        shared_expert_intermediate_size=32,
        num_experts=4,
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[],
        indexer_n_heads=8,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        ngram_vocab_size_base=100,
    ),
    "glm5_next": _glm5_next,
}


@cache
def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = CHAINED[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv" in name and weight.dim() > 1:  # tame by default
                weight.uniform_(-0.7, 0.7)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@cache
def target_of(family: str) -> Target:
    return Target(model_of(family))


FAST = ("bloom", "gpt_neo", "zaya")
EXACT = [family if family in FAST else pytest.param(family, marks=pytest.mark.long) for family in CHAINED]


@pytest.mark.parametrize("family", EXACT)
def test_drafts_and_further_turns_change_no_answer(family: str) -> None:
    model, target, prompt = model_of(family), target_of(family), prompt_of(45)
    assert not target.takes_trees
    expected = generated(model, prompt, 30)
    assert output_tokens(run(target, prompt, SamplingConfig(), 30)) == expected
    for seed in range(2):
        steps = run(target, prompt, SamplingConfig(), 30, drafter=WrongDrafter(45, expected, VOCABULARY, seed))
        assert output_tokens(steps) == expected and len(steps) < 29
    again = [*prompt, *expected, *prompt_of(9)]
    expected = generated(model, again, 20)
    steps = run(target, again, SamplingConfig(), 20, drafter=WrongDrafter(len(again), expected, VOCABULARY, 5))
    assert output_tokens(steps) == expected and steps[0].cached_tokens > 45


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.one_in(2)
def test_an_answer_is_drawn_with_its_seed(sampling: SamplingConfig) -> None:
    target, prompt = target_of("zaya"), prompt_of(30)
    expected = output_tokens(run(target, prompt, sampling, 24))
    assert (
        output_tokens(run(target, prompt, sampling, 24, drafter=WrongDrafter(30, expected, VOCABULARY, 1))) == expected
    )


def test_several_answers_at_once_and_conversations_in_turn() -> None:
    model, target = model_of("zaya"), target_of("zaya")
    prompts = [prompt_of(length) for length in (25, 60, 33)]
    expected = [generated(model, prompt, 12) for prompt in prompts]
    requests = [
        Request(number, prompt, Sampler(SamplingConfig(), prompt), WrongDrafter(len(prompt), truth, VOCABULARY, number))
        for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True))
    ]
    passes = target.log.passes
    session = Session[int](target, target.allocate(3), max_new_tokens=12)
    assert all_answered(session, requests) == expected
    assert target.log.passes <= passes + 3 + 11, "each step has one pass"

    one = Session[int](target, target.allocate(1), max_new_tokens=12, prefixes=PrefixCache(1 << 24))
    for prompt, answer in zip(prompts, expected, strict=True):
        assert answered(one, prompt)[0] == answer
    again = [*prompts[0], *expected[0], *prompt_of(5)]
    continued, cached = answered(one, again)
    assert continued == generated(model, again, 12) and cached >= 25


def test_a_changed_end_of_a_long_prompt_goes_on_from_a_kept_cache() -> None:
    model, target, prompt = model_of("zaya"), target_of("zaya"), prompt_of(300)
    run(target, prompt, SamplingConfig(), 8)
    other = [*prompt[:290], *prompt_of(12)]
    steps = run(target, other, SamplingConfig(), 8)
    assert output_tokens(steps) == generated(model, other, 8) and steps[0].cached_tokens == 300 - 32
    kept = target.cache.slots[0].kept
    assert isinstance(kept, ReplayedCaches)
    parts = [one.states for one in kept.older]
    assert [one.length for one in kept.older] == [268, 302]
    assert bytes_of(parts) < 0.75 * sum(bytes_of([part]) for part in parts), "a beginning is a part of what follows"


def test_a_kept_cache_stays_as_it_is() -> None:
    target, prompt = target_of("zaya"), prompt_of(40)
    target.cache.slots[0].cut(0)
    target.prefill(target.cache, 0, prompt)
    slot = target.cache.slots[0]
    kept = slot.kept
    assert isinstance(kept, ReplayedCaches)
    before = {place: tensor.clone() for place, tensor in tensors_of(kept.filled.states).items()}
    filled = kept.filled
    for drafts in ([], [1], [2, 3, 4]):
        target.verify(target.cache, [DraftTree.of(5, drafts, range(ROOT, len(drafts) - 1))])
    assert all(torch.equal(before[place], tensor) for place, tensor in tensors_of(filled.states).items())
    target.commit(target.cache, 0, [0])
    assert kept.filled is filled and slot.tokens[filled.length :] == [5, 2]


def test_an_interrupted_answer_leaves_the_conversation_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, prompt = model_of("zaya"), target_of("zaya"), prompt_of(45)
    expected = generated(model, prompt, 30)
    call, calls = target.stock.call, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        output = call(*args, **kwargs)
        if calls == 6:
            raise KeyboardInterrupt
        return output

    monkeypatch.setattr(target.stock, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompt, SamplingConfig(), 30, drafter=WrongDrafter(45, expected, VOCABULARY, 2))
    monkeypatch.undo()
    said_before = target.cache.slots[0].tokens
    again = [*said_before, *prompt_of(7)]
    steps = run(target, again, SamplingConfig(), 12)
    assert output_tokens(steps) == generated(model, again, 12) and steps[0].cached_tokens >= 45


def test_a_pass_that_overflows_is_made_again_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target, prompt = model_of("zaya"), target_of("zaya"), prompt_of(45)
    expected = generated(model, prompt, 16)
    call = target.stock.call

    def overflowing(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = call(ids, *args, **kwargs)
        if kwargs.get("logits_to_keep", 1) > 1:
            output.logits.fill_(float("nan"))
        return output

    monkeypatch.setattr(target.stock, "call", overflowing)
    drafter = WrongDrafter(45, expected, VOCABULARY, 2)
    assert output_tokens(run(target, prompt, SamplingConfig(), 16, drafter=drafter)) == expected


def test_hidden_states_are_those_of_the_accepted_tokens() -> None:
    model = model_of("bloom")
    target, prompt = Target(model), prompt_of(20)
    target.watch_hidden()
    expected = generated(model, prompt, 16)
    run(target, prompt, SamplingConfig(), 16, drafter=WrongDrafter(20, expected, VOCABULARY, 3))
    slot = target.cache.slots[0]
    hidden = slot.all_hidden()
    assert hidden is not None and len(hidden) == len(slot.tokens)
    with torch.inference_mode():
        plain = model.base_model(torch.tensor([slot.tokens])).last_hidden_state[0]
    assert torch.allclose(hidden, plain, atol=1e-3)


def test_many_waiting_tokens_are_read_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_passes, "MAX_WAITING", 2)
    model, target, prompt = model_of("zaya"), target_of("zaya"), prompt_of(33)
    expected = generated(model, prompt, 30)
    steps = run(target, prompt, SamplingConfig(), 30, drafter=WrongDrafter(33, expected, VOCABULARY, 1))
    assert output_tokens(steps) == expected and any(not len(step.tree) for step in steps)


def test_trees_are_cut_to_their_first_chain() -> None:
    tree = DraftTree.of(7, [1, 2, 3, 4, 5], [ROOT, ROOT, 1, 0, 3])
    chain = tree.first_chain()
    assert not tree.is_chain and chain.is_chain and chain.all_tokens == [7, 1, 4, 5]
    assert chain.first_chain() is chain and DraftTree.bare(3).is_chain


def test_a_wrong_pass_over_several_tokens_is_refused_with_both_reasons() -> None:
    layers = ["linear_attention", "full_attention"]
    model = _of("MiniMax", num_hidden_layers=2, layer_types=layers, block_size=16, num_local_experts=4).eval()
    with pytest.raises(FamilyError, match=r"small tree .*; a chain .* passes over several tokens .*Use generate"):
        Target(model)


def test_a_state_outside_of_the_cache_is_refused_by_name() -> None:
    shape: dict[str, Any] = {"num_key_value_heads": 1, "attention_window_size": 32, "num_hidden_layers": 3}
    with pytest.raises(FamilyError, match="conv1d_state is a state outside of the cache"):
        Target(_of("RecurrentGemma", without=("head_dim",), **shape).eval())
