"""Mixtures of experts in compiled code: the numbers of the library, and only chosen experts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Module, Parameter
from transformers import AutoTokenizer

from hdtool.data import demo
from hdtool.runtime.engines.cpu.weight_table import router_record
from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.kernels.mixture_of_experts import CompiledExperts, compile_experts, route
from hdtool.runtime.program.mixer_parts import Router
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from tests.support.described import EXPERTS, model_of
from tests.support.families import random_model

pytestmark = pytest.mark.usefixtures("wide")


def experts_of(name: str) -> tuple[Module, Module]:
    """Those of a layer by the library, and compiled."""
    model = model_of(name)
    (*_, block) = (module for module in model.modules() if module._modules.get("experts"))
    usual = block.experts
    compile_experts(model)
    found = block.experts
    assert type(found) is CompiledExperts and type(usual) is not CompiledExperts
    return usual, found


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "nemotron_h, experts"])
@torch.inference_mode()
def test_experts_have_the_numbers_of_the_library(name: str) -> None:
    usual, found = experts_of(name)
    for rows in (1, 2, 7, 40):
        hidden, routing_weights = torch.randn(rows, 64), torch.rand(rows, 2)
        chosen = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
        of_all = found(hidden, chosen, routing_weights)
        expected = usual(hidden, chosen, routing_weights)
        torch.testing.assert_close(of_all, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        for row in (0, rows - 1):
            alone = found(hidden[row : row + 1], chosen[row : row + 1], routing_weights[row : row + 1])
            assert torch.equal(alone[0], of_all[row])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_experts_that_no_row_has_are_not_read(name: str) -> None:
    _, found = experts_of(name)
    hidden, chosen, routing_weights = torch.randn(5, 64), torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    expected = found(hidden, chosen, routing_weights)
    for weight in found.parameters():
        weight[1], weight[3] = float("nan"), float("nan")
    assert torch.equal(found(hidden, chosen, routing_weights), expected)


def test_gradients_are_the_librarys() -> None:
    usual, found = experts_of("qwen3_moe")
    hidden = torch.randn(3, 64, requires_grad=True)
    given = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    found(hidden, *given).sum().backward()
    again = hidden.detach().clone().requires_grad_()
    usual(again, *given).sum().backward()
    assert hidden.grad is not None and again.grad is not None
    torch.testing.assert_close(hidden.grad, again.grad)


@pytest.mark.parametrize("renorms", [False, True])
def test_routes_are_those_of_torch(renorms: bool) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 16)
    chosen, routing_weights = np.zeros((9, 4), np.int64), np.zeros((9, 4), np.float32)
    router = Router(torch.zeros(16, 64), None, 4, False, renorms, None, 1, 1, 2, 1.0, 0.0, 0.0)
    route(router_record(router), logits.clone().numpy(), chosen, routing_weights)
    probs, best = logits.softmax(1).topk(4)
    assert chosen.tolist() == best.tolist()
    torch.testing.assert_close(
        torch.from_numpy(routing_weights), probs / probs.sum(1, keepdim=True) if renorms else probs
    )


def test_experts_that_compute_something_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    kind: Any = type(model.model.layers[0].mlp.experts)
    usual = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given: usual(*given).clamp(max=1e-3))
    compile_experts(model)
    assert type(model.model.layers[0].mlp.experts) is kind
    monkeypatch.setattr(kind, "forward", usual)
    model.model.layers[0].mlp.experts.down_proj = Parameter(torch.zeros(4, 64, 96))
    compile_experts(model)
    assert type(model.model.layers[0].mlp.experts) is kind
    assert type(model.model.layers[1].mlp.experts) is CompiledExperts


def test_experts_of_a_checkpoint_in_16_bits_stay_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random_model("Qwen3Moe", **EXPERTS, moe_intermediate_size=64, vocab_size=2048)
    model.to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[arg-type]
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(tmp_path)
    target = load(ModelConfig(str(tmp_path))).target
    weights = [weight for name, weight in target.model.named_parameters() if ".experts." in name]
    assert target.compiled and len(weights) == 4 and all(map(is_compact, weights))
