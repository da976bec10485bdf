"""Compiled passes of the families that are described beside Llama: right, or not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hdtool.runtime.kernels.experts import compile_experts
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.described import (
    CHANGES,
    DESCRIBED_MODELS,
    WRONG,
    WRONG_EXPERTS,
    WRONG_LATENTS,
    WRONG_LAYER_NORMS,
    assert_right,
    compiled_of,
    compiles_as,
    model_of,
    target_of,
)
from tests.support.fused import TREE, compiled, logits_of, widen
from tests.support.oracle import prompt_of


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a head is rotated in some models, so it has the numbers of four small vectors."""
    widen(monkeypatch)
    monkeypatch.setitem(families.SHAPE, "head_dim", 32)


@pytest.mark.parametrize("name", DESCRIBED_MODELS)
@pytest.mark.one_in(4)
def test_trees_get_the_logits_of_forward(name: str) -> None:
    target = compiled_of(name)
    assert_right(target.model, target, ((6, 0, 20), (20, 6), (30, 4, 9)))
    assert compiled(target).is_current and compiled(target).passes >= 6


@pytest.mark.parametrize("fault", [*WRONG, *WRONG_EXPERTS, *WRONG_LATENTS, *WRONG_LAYER_NORMS])
def test_a_wrong_description_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = WRONG | WRONG_EXPERTS | WRONG_LATENTS | WRONG_LAYER_NORMS
    assert not compiles_as(*faults[fault], monkeypatch)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_is_not_compiled(change: str) -> None:
    target = target_of("gemma3")
    CHANGES[change](target.model)
    assert not target.compile()


def a_new_attribute(block: Any) -> None:
    block.temperature = 1.0


def one_of_the_router(block: Any) -> None:
    block.gate.clamp_limit = 7.0


def a_replaced_router(block: Any) -> None:
    block.gate.forward = lambda rows: type(block.gate).forward(block.gate, 1.01 * rows)


def a_module_more(block: Any) -> None:
    block.norm = torch.nn.Identity()


def a_buffer_more(block: Any) -> None:
    block.gate.register_buffer("scale", torch.ones(4))


def a_hook(block: Any) -> None:
    block.shared_experts.register_forward_hook(lambda module, inputs, rows: 1.01 * rows)


def weights_in_double(block: Any) -> None:
    block.gate.weight.data = block.gate.weight.data.double()


CHANGED_EXPERTS = (
    a_new_attribute, one_of_the_router, a_replaced_router, a_module_more, a_buffer_more, a_hook, weights_in_double,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGED_EXPERTS, ids=lambda change: change.__name__)
def test_a_mixture_that_differs_is_not_compiled(change: Callable[[Any], None]) -> None:
    target = target_of("glm4_moe")
    change(target.model.model.layers[1].mlp)
    assert not target.compile()


@pytest.mark.parametrize("name", DESCRIBED_MODELS)
@pytest.mark.one_in(4)
def test_weights_in_16_bits_give_the_bits_of_float32(name: str) -> None:
    found = []
    for is_compact in (False, True):
        model = model_of(name)
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
        if is_compact:
            compact_weights(model)
        compile_linear_layers(model)
        compile_experts(model)
        target = Target(model)
        target.compile()
        assert target.compiled
        found.append(logits_of(target, prompt_of(40)))
    assert torch.equal(*found)


def test_a_head_of_which_no_whole_vectors_are_rotated_is_the_librarys() -> None:
    model = families.random_model("Glm", partial_rotary_factor=0.375)
    compile_linear_layers(model)
    assert not Target(model).compile()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_outputs_of_layers_are_those_of_the_library(name: str) -> None:
    """Beside the input of the output layer, of prompts, trees and batches."""
    target, usual = compiled_of(name), target_of(name)
    found = list[list[torch.Tensor]]()
    for one in (target, usual):
        columns = [one.watch_hidden(), one.watch_hidden([1, 0])]
        assert columns == [slice(0, 64), slice(64, 192)]
        cache = one.allocate(2)
        hidden = [one.prefill(cache, slot, prompt_of(length), room=64).hidden for slot, length in ((0, 150), (1, 9))]
        hidden += [verified.hidden for verified in one.verify(cache, [TREE, TREE])]
        found.append([rows.clone() for rows in hidden if rows is not None])
    assert compiled(target).is_current and usual.compiled is None
    assert len(found[0]) == len(found[1]) == 4
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)
