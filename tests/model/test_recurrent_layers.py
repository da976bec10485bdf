"""Recurrent layers over trees: each row as if it had been decoded token by token, by levels and in closed form."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hdtool.runtime.caches.kv_cache import StaticKVCache
from hdtool.runtime.core.tolerances import LOW_PRECISION_TOLERANCE, STRICT_TOLERANCE, distances
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.engines.proofs import recurrent_tree_proof as recurrences
from hdtool.runtime.engines.proofs.recurrent_tree_proof import between
from hdtool.runtime.engines.reference.mixers import mix
from hdtool.runtime.engines.reference.tree_recurrences import MixerStates
from hdtool.runtime.engines.stock import recurrent_layers
from hdtool.runtime.engines.stock.recurrent_layers import described_mixers
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, output_tokens, run
from tests.support.families import HYBRIDS, VOCABULARY, model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.trees import WrongDrafter, path_to, tokens_to, trees

BY_LEVELS = {"jamba"}
"""Nobody described its mixers, Mamba's of the first version."""
BOUNDED = {"nemotron_h", "zamba2"}
"""Transformers bounds their time steps while it reads a prompt; in these models, the bound is too small to matter."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = [(hybrid, form) for hybrid in HYBRIDS for form in ("levels", "closed") if (hybrid, form) != ("jamba", "closed")]
MAX_NEW_TOKENS = 30


@cache
def target_of(hybrid: str, dtype: str, form: str = "closed") -> Target:
    """With the form "levels", as if nobody had described the mixers."""
    with pytest.MonkeyPatch.context() as patch:
        if form == "levels":
            patch.setattr(recurrences, "described_mixers", lambda model, shapes: {})
        return Target(model_of(hybrid, DTYPES[dtype]), never)


def recurrent_of(target: Target) -> Any:
    assert target.facts.recurrent
    return target.facts.recurrent


@torch.inference_mode()
def decoded(target: Target, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The logits after each of ``tokens``, which the library's own code reads one by one after a prompt."""
    used = DynamicCache(config=target.config)
    target.stock.forward([list(context)], [range(len(context))], None, used)
    rows = []
    for at, token in enumerate(tokens, len(context)):
        rows.append(target.stock.forward([[token]], [[at]], None, used)[0, -1])
    return torch.stack(rows)


def assert_decoded(
    target: Target, prompt: Sequence[int], answer: Sequence[int], tree: DraftTree, logits: torch.Tensor
) -> None:
    """Every row of a tree after an answer has the logits that its path has, decoded token by token."""
    found, expected = [], []
    for leaf in set(range(ROOT, len(tree))) - set(tree.parents.tolist()) or {ROOT}:
        path = path_to(tree, leaf)
        found.append(logits[[0, *(node + 1 for node in path)]])
        expected.append(decoded(target, prompt, [*answer, *tokens_to(tree, leaf)])[len(answer) :])
    assert_near(target, torch.cat(found), torch.cat(expected))


def assert_near(target: Target, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding; in 16 bits the median, since a token may be sent to another expert."""
    each = distances(found, expected)
    if target.dtype == torch.float32:
        assert each.max() <= STRICT_TOLERANCE
    else:
        assert each.median() <= LOW_PRECISION_TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_closed_forms_are_used_where_the_layers_have_one(hybrid: str, dtype: str) -> None:
    target = Target(model_of(hybrid, DTYPES[dtype]), never)
    assert recurrent_of(target).can_be_captured == (hybrid not in BY_LEVELS)
    assert not recurrent_of(target_of(hybrid, dtype, "levels")).can_be_captured
    assert target.facts.continues == (hybrid not in BY_LEVELS | BOUNDED)


def test_a_mixer_that_holds_other_states_than_described_runs_by_levels() -> None:
    """Without this, a wrong closed form that matters little in a short context could pass the check."""
    target = target_of("qwen3_5", "float32")
    shapes = target.facts.state_shapes
    assert described_mixers(target.model, shapes)
    more = shapes[-1]._replace(name=shapes[-1].name._replace(number=1))
    assert not described_mixers(target.model, [*shapes, more])
    assert not described_mixers(target.model, shapes[:-1])


@pytest.mark.parametrize("hybrid", ["qwen3_5", "kimi_linear", "granitemoehybrid", "lfm2"])
def test_a_wrong_closed_form_is_not_used(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_layers, "mix", lambda *args: mix(*args) * 2)
    target, prompt = Target(model_of(hybrid), never), prompt_of(20)
    assert not recurrent_of(target).can_be_captured
    steps = run(target, prompt, SAMPLINGS["greedy"], MAX_NEW_TOKENS)
    assert output_tokens(steps) == generated(target.model, prompt, MAX_NEW_TOKENS)


@pytest.mark.parametrize("hybrid", ["qwen3_5", "kimi_linear"])
def test_a_mixer_with_an_unknown_attribute_runs_by_levels(hybrid: str) -> None:
    model: Any = copy.deepcopy(model_of(hybrid))
    next(module for module in model.modules() if hasattr(module, "A_log")).temperature = 0.9
    assert not recurrent_of(Target(model, never)).can_be_captured


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hybrid", "form"), FORMS)
def test_rows_of_a_tree_have_the_logits_of_decoding_token_by_token(hybrid: str, form: str, dtype: str) -> None:
    """Trees in three slots at once, and others after paths of them were accepted."""
    target = target_of(hybrid, dtype, form)
    both = st.tuples(trees(VOCABULARY, max_nodes=9), trees(VOCABULARY, max_nodes=5))

    @settings(max_examples=3)
    @given(st.lists(st.tuples(st.integers(1, 30), both), min_size=1, max_size=3), st.data())
    def check(drawn: list[tuple[int, tuple[DraftTree, DraftTree]]], data: st.DataObject) -> None:
        cache, prompts = target.allocate(len(drawn)), [prompt_of(length) for length, _ in drawn]
        for slot, prompt in enumerate(prompts):
            target.prefill(cache, slot, prompt, room=20)
        answers: list[list[int]] = [[] for _ in drawn]
        for which in (0, 1):
            drafted = [of_slot[which] for _, of_slot in drawn]
            verified = target.verify(cache, drafted)
            for slot, (tree, found) in enumerate(zip(drafted, verified, strict=True)):
                assert_decoded(target, prompts[slot], answers[slot], tree, found.logits)
                node = data.draw(st.integers(ROOT, len(tree) - 1))
                target.commit(cache, slot, path_to(tree, node))
                answers[slot] += tokens_to(tree, node)

    check()


def test_in_16_bits_one_row_may_go_to_other_experts_whatever_the_type_of_the_logits() -> None:
    target, expected = target_of("mamba2", "bfloat16"), torch.randn(3, VOCABULARY)
    found = torch.cat([-expected[:1], expected[1:]])
    assert between(target.stock, target.facts, found, expected) == 0
    other = target_of("mamba2", "float32")
    assert between(other.stock, other.facts, found, expected) > 1


@pytest.mark.parametrize("hybrid", ["qwen3_5", "granitemoehybrid", "jamba"])
def test_a_wrong_parent_would_be_seen(hybrid: str) -> None:
    """The tests above can fail: the same tokens with other parents have other logits."""
    target, context = target_of(hybrid, "float32"), prompt_of(12)
    cache = target.allocate()
    target.prefill(cache, 0, context, room=20)
    chain = DraftTree.of(5, [8, 9, 10], [ROOT, 0, 1])
    star = DraftTree.of(5, [8, 9, 10], [ROOT, ROOT, ROOT])
    with pytest.raises(AssertionError):
        assert_decoded(target, context, [], star, target.verify(cache, [chain])[0].logits)


def test_an_interrupt_while_states_are_written_leaves_none_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have the states after the accepted path then, and others those before it."""
    one = OneSequence(Target(model_of("falcon_h1"), never))
    prompt, written, commit = prompt_of(30), list[int](), MixerStates.commit

    def interrupt(states: MixerStates, slot: int, rows: Sequence[int], into: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(slot)
        commit(states, slot, rows, into)

    one.read_on(prompt)
    one.verify(DraftTree.of(5, [8, 9], [ROOT, 0]))
    monkeypatch.setattr(MixerStates, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.commit([0, 1])
    monkeypatch.undo()
    longer = [*prompt, 5, 8, 9, *prompt_of(7)]
    assert_same_logits(one.read_on(longer)[0], plain_logits(one.target.model, longer))
    assert one.cached_tokens in (0, len(prompt))


@pytest.mark.parametrize("hybrid", sorted(BOUNDED))
def test_a_time_step_that_long_passes_alone_limit_is_not_limited_in_trees(hybrid: str) -> None:
    """The library limits the time step in passes of several tokens and not where it decodes."""
    tame: Any = model_of(hybrid)
    config = copy.deepcopy(tame.config)
    config.time_step_min = type(config)().time_step_min
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(tame.state_dict())
    model.generation_config = tame.generation_config
    target = Target(model, never)
    assert not target.facts.continues, "a prompt in parts would have other logits than one that is read at once"
    for length in (1, 20, 90):
        prompt = prompt_of(length)
        expected = generated(model, prompt, MAX_NEW_TOKENS)
        for seed in range(3):
            drafter = WrongDrafter(length, expected, VOCABULARY, seed)
            assert answer_of(target, prompt, SAMPLINGS["greedy"], MAX_NEW_TOKENS, drafter=drafter) == expected
            assert drafter.accepted
        longer = [*prompt, *expected, *prompt_of(7)]
        steps = run(target, longer, SAMPLINGS["greedy"], MAX_NEW_TOKENS)
        assert output_tokens(steps) == generated(model, longer, MAX_NEW_TOKENS) and steps[0].cached_tokens == 0


def test_hooks_of_projections_are_called_once_for_each_row() -> None:
    model: Any = copy.deepcopy(model_of("jamba"))
    target, prompt = Target(model, never), prompt_of(20)
    for name in ("in_proj", "out_proj"):
        projection = next(module for key, module in model.named_modules() if key.endswith(f"mamba.{name}"))
        hook = projection.register_forward_hook(lambda module, args, found: found * 1.2)
        expected = generated(model, prompt, MAX_NEW_TOKENS)
        drafter = WrongDrafter(len(prompt), expected, VOCABULARY, 1)
        assert answer_of(target, prompt, SAMPLINGS["greedy"], MAX_NEW_TOKENS, drafter=drafter) == expected
        assert target.takes_trees
        hook.remove()


@pytest.mark.parametrize("interrupted", range(3))
def test_a_cache_whose_growth_is_interrupted_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, interrupted: int) -> None:
    target = target_of("qwen3_5", "float32")
    cache = target.allocate(3, 64)
    target.prefill(cache, 0, prompt_of(9), 0)
    storage, slots, own, made = cache.storage, list(cache.slots), StaticKVCache.__init__, 0

    def interrupt(self: StaticKVCache, storage: Any) -> None:
        nonlocal made
        made += 1
        if made > interrupted:
            raise KeyboardInterrupt
        own(self, storage)

    monkeypatch.setattr(StaticKVCache, "__init__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(1000)
    assert cache.storage is storage and cache.slots == slots
