"""The library computes models of other kinds, models that were changed, and passes that compiled code does not take."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hdtool.runtime.budget.measure_passes import _saved_file
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.linear_layers import has_compiled_layers
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.model.reference_logits import more_precise
from hdtool.runtime.model.transformers_internals import cache_argument
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.changes import mlp_of, with_other_data
from tests.support.families import FAMILIES
from tests.support.fused import (
    TREE,
    after,
    both,
    compile_target,
    compiled,
    logits_of,
    model_of,
    widen,
    with_compiled_layers,
)
from tests.support.oracle import assert_same_logits, prompt_of

SAME = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"),
    *("glm4", "lfm2", "cohere2", "starcoder2", "mixtral", "gpt_oss"),
)
"""Families whose models are compiled."""


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "deepseek_v3" not in request.node.name:
        widen(monkeypatch)


def test_weights_that_are_replaced_within_an_answer_are_not_freed() -> None:
    """The answer goes on with those that computed its keys and values; the next prompt is read with the new ones."""
    usual, fused = both()
    one = after(fused, prompt_of(20))
    before = one.verify(TREE).clone()
    weight = mlp_of(fused.model).down_proj.weight
    memory = weakref.ref(weight.untyped_storage())
    with_other_data(fused.model)
    assert memory() is not None and torch.equal(one.verify(TREE), before)
    mlp_of(usual.model).down_proj.weight.data = weight.data
    assert torch.equal(logits_of(fused, prompt_of(20)), logits_of(usual, prompt_of(20)))
    assert memory() is None


@pytest.mark.parametrize("through_data", [False, True])
def test_rotary_frequencies_that_are_written_in_place_are_read_as_they_are(through_data: bool) -> None:
    usual, fused = (after(target, prompt_of(30)) for target in both())
    for one in (usual, fused):
        frequencies: torch.Tensor = one.target.model.model.rotary_emb.inv_freq
        (frequencies.data if through_data else frequencies).mul_(0.5)
    found, expected = (one.read_on([*prompt_of(30), 4, 5]) for one in (fused, usual))
    assert_same_logits(found, expected)
    assert fused.cached_tokens == usual.cached_tokens == 0
    assert is_compiled(fused.target)


def is_compiled(target: Target, block: Any = None) -> bool:
    """Whether the passes of an answer are computed in compiled code, in a block."""
    with block or nullcontext():
        one = after(target, prompt_of(9))  # the first prompt after a change proves the model
        before = compiled(target).passes
        one.prefill(prompt_of(9))
        one.verify(TREE)
    passes = compiled(target).passes - before
    assert passes in (0, 2)
    return passes > 0


def test_the_model_itself_is_the_librarys() -> None:
    usual, fused = both()
    model, passes = fused.model, compiled(fused).passes
    ids = torch.tensor([prompt_of(6)])
    for cached in (False, True):
        found, expected = (
            one.model(ids, **cache_argument(one.model, DynamicCache() if cached else None)) for one in (fused, usual)
        )
        assert found.logits.requires_grad and torch.equal(found.logits, expected.logits)
    with more_precise(model, torch.device("cpu")):
        assert model(ids).logits.dtype == torch.float64
    assert compiled(fused).passes == passes
    assert is_compiled(fused)


def test_passes_that_compiled_code_does_not_take() -> None:
    _, fused = both()
    model = fused.model
    assert is_compiled(fused) and is_compiled(fused, torch.enable_grad())
    assert not is_compiled(fused, torch.autocast("cpu", torch.bfloat16))
    model.train()
    assert not is_compiled(fused)
    model.eval()
    assert is_compiled(fused)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    assert not is_compiled(fused)
    hook.remove()
    assert is_compiled(fused)
    model.set_attn_implementation("eager")
    assert not is_compiled(fused)
    model.set_attn_implementation("sdpa")
    assert is_compiled(fused)


def test_the_library_may_record_the_outputs_of_layers() -> None:
    """It does so by hooks, which stay."""
    usual, fused = both()
    ids = torch.tensor([prompt_of(6)])
    found, expected = (one.model(ids, output_hidden_states=True) for one in (fused, usual))
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states)) and len(found.hidden_states) == 3
    assert not is_compiled(fused)
    assert torch.equal(logits_of(fused, prompt_of(9)), logits_of(usual, prompt_of(9)))


def test_tokens_without_an_embedding_are_refused_by_the_library() -> None:
    _, fused = both()
    one = after(fused, prompt_of(20))
    counted = compiled(fused).passes
    with pytest.raises(IndexError):
        one.verify(DraftTree.of(1, [fused.vocabulary], [-1]))
    with pytest.raises(IndexError):
        one.prefill([1, fused.vocabulary])
    assert compiled(fused).passes == counted


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_kinds_are_the_librarys(family: str) -> None:
    torch.manual_seed(1)
    target = with_compiled_layers(FAMILIES[family]())
    before = logits_of(target, prompt_of(30))
    target.compile()
    rotates_narrowly = family == "glm4" and LANES > 8  # half of each head, which is 16 wide
    assert (target.compiled is not None) == (family in SAME and not rotates_narrowly)
    if target.compiled is None:
        assert torch.equal(logits_of(target, prompt_of(30)), before)
    else:
        assert_same_logits(logits_of(target, prompt_of(30)), before)


def test_models_with_positions_that_depend_on_the_length_are_the_librarys() -> None:
    torch.manual_seed(1)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = with_compiled_layers(families.random_model("Llama", rope_parameters=rope, max_position_embeddings=64))
    before = logits_of(target, prompt_of(30))
    assert not target.compile()
    assert_same_logits(logits_of(target, prompt_of(30)), before)


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (LlamaRMSNorm, lambda norm, x, usual=LlamaRMSNorm.forward: usual(norm, x) * 1.001),
        (LlamaMLP, lambda unit, x, usual=LlamaMLP.forward: usual(unit, x) + 0.001 * x),
    ],
)
def test_layers_of_other_numbers_are_refused_at_loading(
    kind: type, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same structure, but a norm is scaled, or the unit adds a part of its input."""
    monkeypatch.setattr(kind, "forward", other)
    assert not with_compiled_layers(model_of()).compile()
    monkeypatch.undo()


def test_a_class_whose_code_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, fused = both()
    logits_of(fused, prompt_of(20))
    monkeypatch.setattr(LlamaMLP, "forward", lambda unit, rows: unit.down_proj(unit.up_proj(rows)))
    assert torch.equal(logits_of(fused, prompt_of(20)), logits_of(usual, prompt_of(20)))
    assert not is_compiled(fused)
    monkeypatch.undo()
    assert is_compiled(fused)


def test_a_model_with_other_parts_is_the_librarys() -> None:
    model = model_of()
    model.model.add_module("adapter", torch.nn.Identity())
    assert not with_compiled_layers(model).compile()


def test_copies_and_files_have_the_model_of_the_library(tmp_path: Path) -> None:
    usual, fused = both()
    expected = logits_of(usual, prompt_of(9))
    torch.save(fused.model, tmp_path / "model.pt")
    copies = copy.deepcopy(fused.model), torch.load(tmp_path / "model.pt", weights_only=False)
    for copied in copies:
        assert has_compiled_layers(copied)
        assert torch.equal(logits_of(Target(copied), prompt_of(9)), expected)
    assert fused.model.state_dict().keys() == usual.model.state_dict().keys() == model_of().state_dict().keys()
    with_other_data(copies[0])
    assert is_compiled(fused)
    fused.use_compiled(None)
    assert torch.equal(logits_of(fused, prompt_of(9)), expected)


def test_a_copy_may_be_compiled_too() -> None:
    _, fused = both()
    copied = Target(copy.deepcopy(fused.model))
    compile_target(copied)
    assert torch.equal(logits_of(copied, prompt_of(9)), logits_of(fused, prompt_of(9)))
    assert is_compiled(copied)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "float32"}, True),
        ({"fused_layers": False}, False),
        ({"attn_implementation": "sdpa"}, False),
        ({"attn_implementation": "eager"}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_loading_compiles_a_model_unless_told_otherwise(
    tmp_path: Path, changes: dict[str, Any], expected: bool
) -> None:
    families.saved(model_of(dtype=torch.bfloat16).bfloat16(), tmp_path)
    loaded = load(ModelConfig(str(tmp_path), device="cpu", **changes))
    assert (loaded.target.compiled is not None) == expected
    assert loaded.target.log.passes == 0 and loaded.target.log.seconds == 0


def test_costs_of_passes_are_kept_apart(home: Path) -> None:
    usual, fused = both()
    assert _saved_file(usual) != _saved_file(fused)
