"""Whole passes in our own code: the logits of the model, which computes what this code does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.kernels.small_batch_linear import use_small_batch_products
from hdtool.runtime.model.checks.trees import some_context
from hdtool.runtime.model.fused import proof, whole_pass
from hdtool.runtime.model.fused.layer_stack import stack_of
from hdtool.runtime.model.fused.proof import fuse_layers
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree
from tests.support import families
from tests.support.decoding import run, said
from tests.support.fused import KINDS, TREE, after, both, logits_of, model_of, stack, widen
from tests.support.oracle import assert_same_logits, prompt_of


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)


def without_the_model(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a model of this class raises from now on."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model computes a pass")

    monkeypatch.setattr(type(target.model), "__call__", refuse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_those_of_the_model(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, fused = (after(target, prompt_of(40)) for target in both(kind, dtype))
    expected = [usual.verify(TREE).clone(), usual.prefill([3, 9], 40)]
    without_the_model(fused.target, monkeypatch)
    found = [fused.verify(TREE).clone(), fused.prefill([3, 9], 40)]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert_same_logits(one, other)


def test_positions_beyond_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_pass, "FEWEST_POSITIONS", 4)
    usual, fused = both()
    for length in (3, 50, 12, 200):
        assert_same_logits(logits_of(fused, prompt_of(length)), logits_of(usual, prompt_of(length)))


def with_a_hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)


def with_another_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data = torch.rand_like(model.model.embed_tokens.weight)


def with_another_norm(model: Any) -> None:
    model.model.norm.weight = Parameter(torch.rand(64))


def with_another_forward(model: Any) -> None:
    usual = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        found = usual(*arguments, **options)
        found.logits = found.logits * 2
        return found

    model.forward = forward


@pytest.mark.parametrize("change", [with_a_hook, with_another_embedding, with_another_norm, with_another_forward])
def test_a_model_that_was_changed_computes_its_own_passes(change: Callable[[Any], None]) -> None:
    usual, fused = both()
    unchanged = logits_of(fused, prompt_of(20))
    for target in (usual, fused):
        torch.manual_seed(5)
        change(target.model)
    found = logits_of(fused, prompt_of(20))
    assert_same_logits(found, logits_of(usual, prompt_of(20)))
    assert (found - unchanged).abs().max() > 0.1


def test_hidden_states_that_drafters_watch_are_those_of_the_model() -> None:
    found = []
    for target in both():
        target.watch_hidden()
        one = after(target, prompt_of(20))
        one.verify(TREE)
        assert one.verified.hidden is not None
        found.append(one.verified.hidden)
    assert_same_logits(found[1], found[0])


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [({}, True), ({"logits_scaling": 2.0}, False), ({"embedding_multiplier": 3.0}, False)],
)
def test_a_model_that_scales_numbers_computes_its_own_passes(changes: Any, is_used: bool) -> None:
    torch.manual_seed(1)
    targets = []
    for fuses in (False, True):
        torch.manual_seed(1)
        model = families._of("Granite", **changes)
        use_small_batch_products(model)
        targets.append(Target(model))
        if fuses:
            assert fuse_layers(targets[1])
    assert (targets[1].whole_pass is not None) == is_used
    assert_same_logits(logits_of(targets[1], prompt_of(20)), logits_of(targets[0], prompt_of(20)))


def test_positions_that_depend_on_the_length_are_those_of_the_model() -> None:
    model: Any = families._of(
        "Llama",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=64,
    )
    use_small_batch_products(model)
    target = Target(model)
    assert fuse_layers(target) and target.whole_pass is None


def test_a_context_of_the_proof_is_not_used_again() -> None:
    """The proof leaves layers out, so the keys and values of its contexts are incomplete."""
    usual, fused = both()
    context = some_context(proof.SHORT + 3, fused.vocabulary)
    found, expected = (run(target, context, SamplingConfig(), 8) for target in (fused, usual))
    assert found[0].cached_tokens == 0
    assert said(found) == said(expected)


def test_passes_are_counted_once() -> None:
    target = both()[1]
    counted = target.log.passes, stack(target).passes
    logits_of(target, prompt_of(20))
    assert (target.log.passes - counted[0], stack(target).passes - counted[1]) == (2, 2)


def test_a_model_with_other_parts_computes_its_own_passes() -> None:
    model = model_of()
    model.model.add_module("adapter", torch.nn.Identity())
    use_small_batch_products(model)
    target = Target(model)
    assert fuse_layers(target) and stack_of(model) and target.whole_pass is None


def test_tokens_without_an_embedding_are_refused_by_the_model() -> None:
    target = both()[1]
    one = after(target, prompt_of(20))
    counted = stack(target).passes
    with pytest.raises(IndexError):
        one.verify(DraftTree.of(1, [target.vocabulary], [-1]))
    assert stack(target).passes == counted
