"""Tiny models that hdtool compiles, run by transformers' code and by compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.kernels.mixture_of_experts import compile_experts
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


def widen(monkeypatch: pytest.MonkeyPatch, head_dim: int = 16) -> None:
    """Give tiny models the sizes that compiled matmuls and vector kernels support."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": head_dim, "initializer_range": 0.3}
    for name, size in sizes.items():
        monkeypatch.setitem(families.SHAPE, name, size)


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Create a float32 model with random norms and biases, whose values ``dtype`` can represent."""
    torch.manual_seed(1)
    model: Any = KINDS[kind]()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            weight.data = torch.rand_like(weight) + 0.5
        weight.data = weight.data.to(dtype).float()
    return model


def both(kind: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Target, Target]:
    """Return a target with compiled linear layers in transformers' code, and one that is compiled as a whole."""
    return _target_of(kind, dtype), compiled_target(kind, dtype)


def compiled_target(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    """Create a target of a model of its own, with compiled passes."""
    target = _target_of(kind, dtype)
    compile_target(target)
    return target


def _target_of(kind: str, dtype: torch.dtype) -> Target:
    model = model_of(kind, dtype)
    if dtype != torch.float32:
        compact_weights(model)
    return with_compiled_layers(model)


def with_compiled_layers(model: Any) -> Target:
    """Create a target with compiled matmuls and experts, which otherwise runs transformers' code."""
    compile_linear_layers(model)
    compile_experts(model)
    return Target(model)


def compile_target(target: Target) -> CompiledModel:
    target.compile()
    assert target.compiled
    return target.compiled


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
