"""Tiny models that hdtool compiles, run by transformers' code and by compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.one_sequence import OneSequence

KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: families.random_model("Llama"),
    "llama with biases": lambda: families.random_model("Llama", attention_bias=True, mlp_bias=True),
    "llama with one head": lambda: families.random_model(
        "Llama", num_attention_heads=1, num_key_value_heads=1, head_dim=64
    ),
    "mistral": lambda: families.random_model("Mistral", sliding_window=None),
    "qwen2": lambda: families.random_model("Qwen2"),
    "qwen3": lambda: families.random_model("Qwen3"),
}
TREE = DraftTree.of(3, [5, 8, 13, 21, 34, 55], [-1, 0, 0, 2, -1, 4])


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tiny models the sizes that compiled matmuls and vector kernels support."""
    for name, size in {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.3}.items():
        monkeypatch.setitem(families.SHAPE, name, size)


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Create a float32 model with random norms and biases, whose values ``dtype`` can represent."""
    torch.manual_seed(1)
    model: Any = KINDS[kind]()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data = torch.rand_like(weight) + 0.5
        weight.data = weight.data.to(dtype).float()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def both(kind: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Target, Target]:
    """Return a target with compiled linear layers in transformers' code, and one that is compiled as a whole."""
    targets = []
    for _ in range(2):
        model = model_of(kind, dtype)
        if dtype != torch.float32:
            compact_weights(model)
        compile_linear_layers(model)
        targets.append(Target(model))
    compile_target(targets[1])
    return targets[0], targets[1]


def compile_target(target: Target) -> CompiledModel:
    target.compile()
    assert target.compiled
    return target.compiled


def compiled_target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Create a target of a model of its own, with compiled passes."""
    widen(monkeypatch)
    model = model_of()
    compile_linear_layers(model)
    target = Target(model)
    compile_target(target)
    return target


def compiled(target: Target) -> CompiledModel:
    assert isinstance(target.compiled, CompiledModel)
    return target.compiled


def logits_of(target: Target, context: list[int], tree: DraftTree = TREE) -> torch.Tensor:
    return after(target, context).verify(tree).clone()


def after(target: Target, context: list[int], *, room: int = 64) -> OneSequence:
    """Return a new sequence that has read a context."""
    one = OneSequence(target)
    one.prefill(context, room=room)
    return one
