"""Models whose layers differ keep those of the library, and so do passes that compiled code does not take."""

from __future__ import annotations

import copy
import shutil
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers.cache_utils import DynamicCache

from hdtool.data import demo
from hdtool.runtime.budget.measure_passes import _saved_file
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.kernels.small_batch_linear import ProductChoice, use_small_batch_products
from hdtool.runtime.model.fused import layer_stack
from hdtool.runtime.model.fused.layer_stack import StackedLayers, stack_of
from hdtool.runtime.model.fused.proof import fuse_layers
from hdtool.runtime.model.library import cache_argument
from hdtool.runtime.model.load import load
from hdtool.runtime.model.precision import more_precise
from hdtool.runtime.model.target import Target
from tests.support.families import FAMILIES
from tests.support.fused import TREE, after, both, logits_of, model_of, stack, widen
from tests.support.oracle import assert_same_logits, prompt_of

SAME = ("llama", "qwen2", "qwen3", "granite", "smollm3")
"""Families whose layers are of this kind with the settings of the tests."""


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "deepseek_v3" not in request.node.name:
        widen(monkeypatch)


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output * 2)


def with_another_module(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.up_proj = Linear(64, 128, bias=False)
    torch.nn.init.normal_(layer.up_proj.weight)


def with_another_weight(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data = torch.rand(64, 64)


def with_another_parameter(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.rand(64))


def with_another_function(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda hidden: hidden * 2


@pytest.mark.parametrize(
    "change", [hooked, with_another_module, with_another_weight, with_another_parameter, with_another_function]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_was_changed_computes_what_it_became(change: Callable[[Any], None], dtype: torch.dtype) -> None:
    usual, fused = both(dtype=dtype)
    unchanged = logits_of(fused, prompt_of(20))
    passes = stack(fused).passes
    for target in (usual, fused):
        torch.manual_seed(5)
        with torch.no_grad():
            change(target.model)
    found = logits_of(fused, prompt_of(20))
    assert stack(fused).passes == passes
    assert torch.equal(found, logits_of(usual, prompt_of(20)))
    assert (found - unchanged).abs().max() > 0.1


def test_weights_that_are_replaced_within_an_answer_are_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer goes on with those that computed its keys and values; the next prompt is read with the new ones."""
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: rows <= 64)
    usual, fused = both()
    one = after(fused, prompt_of(20))
    before = one.verify(TREE).clone()
    weight = fused.model.model.layers[0].self_attn.q_proj.weight
    memory = weakref.ref(weight.untyped_storage())
    with_another_weight(fused.model)
    assert memory() is not None and torch.equal(one.verify(TREE), before)
    usual.model.model.layers[0].self_attn.q_proj.weight.data = weight.data
    assert torch.equal(logits_of(fused, prompt_of(20)), logits_of(usual, prompt_of(20)))


def test_a_prompt_that_continues_kept_context_notices_replaced_weights() -> None:
    usual, fused = (after(target, prompt_of(30)) for target in both())
    for one in (usual, fused):
        torch.manual_seed(5)
        with_another_weight(one.target.model)
    found, expected = (one.read_on([*prompt_of(30), 4, 5]) for one in (fused, usual))
    assert torch.equal(found, expected)
    assert fused.cached_tokens == usual.cached_tokens == 0


def test_a_weight_that_is_changed_in_place_is_read_as_it_is() -> None:
    usual, fused = both()
    for target in (usual, fused):
        with torch.no_grad():
            target.model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    assert_same_logits(logits_of(fused, prompt_of(20)), logits_of(usual, prompt_of(20)))


def test_other_passes_are_those_of_the_library() -> None:
    usual, fused = both()
    model, passes = fused.model, stack(fused).passes
    ids = torch.tensor([prompt_of(6)])
    for cached in (False, True):
        found, expected = (
            one.model(ids, **cache_argument(one.model, DynamicCache() if cached else None)) for one in (fused, usual)
        )
        assert found.logits.requires_grad and torch.equal(found.logits, expected.logits)
    for block in (torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        assert not takes(fused, block())
    assert takes(fused, nullcontext())
    model.train()
    assert not takes(fused, nullcontext())
    model.eval()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    assert not takes(fused, nullcontext())
    hook.remove()
    with more_precise(model, torch.device("cpu")):
        assert model(ids).logits.dtype == torch.float64
    assert takes(fused, nullcontext())
    found, expected = (one.model(ids, output_hidden_states=True) for one in (fused, usual))
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states)) and len(found.hidden_states) == 3
    assert not takes(fused, nullcontext()), "the library records hidden states by hooks, which stay"
    assert stack(fused).passes == passes


def takes(target: Target, block: Any) -> bool:
    """Whether a pass over one row would be computed in compiled code."""
    hidden, place = torch.rand(1, 1, 64), torch.rand(1, 1, 16)
    given = {"attention_mask": None, "position_embeddings": (place, place), "cache": target.allocate(1, 4).slots[0].kv}
    stack(target).check_again()
    with torch.no_grad(), block:
        return stack(target).takes(hidden, given)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_other_layers_keep_them(family: str) -> None:
    torch.manual_seed(1)
    model = FAMILIES[family]()
    use_small_batch_products(model)
    target = Target(model)
    before = logits_of(target, prompt_of(30))
    assert fuse_layers(target) == (family in SAME)
    if stack_of(model) is None:
        assert torch.equal(logits_of(target, prompt_of(30)), before)
        assert not any(isinstance(module, StackedLayers) for module in model.modules())


def test_layers_of_other_numbers_are_refused_at_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same structure, but a norm is scaled, or the unit adds a part of its input."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    usual_norm: Any = LlamaRMSNorm.forward
    usual_unit: Any = LlamaMLP.forward
    for kind, other in (
        (LlamaRMSNorm, lambda norm, x: usual_norm(norm, x) * 1.001),
        (LlamaMLP, lambda unit, x: usual_unit(unit, x) + 0.001 * x),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", other)
            model = model_of()
            use_small_batch_products(model)
            assert not fuse_layers(Target(model))
    model = model_of()
    use_small_batch_products(model)
    assert fuse_layers(Target(model))


def test_a_model_that_takes_its_layers_one_by_one_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedLayers, "__getitem__", torch.nn.ModuleList.__getitem__)
    model = model_of()
    use_small_batch_products(model)
    assert not fuse_layers(Target(model))
    assert type(model.model.layers) is torch.nn.ModuleList


@pytest.mark.parametrize("own", [False, True])
def test_several_threads_take_the_attention_of_the_library_where_it_has_much_to_do_beside_its_products(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = both()[1]
    monkeypatch.setattr(ProductChoice, "own", lambda choice, rows: own)
    monkeypatch.setattr(layer_stack, "MOST_WORK", 7 * 40 * 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: layer_stack.FEW_THREADS + 1)
    for length, expected in ((40, 1), (41, int(own))):
        one = after(fused, prompt_of(length))
        before = stack(fused).passes
        one.verify(TREE)
        assert stack(fused).passes - before == expected


def test_copies_and_files_have_the_layers_of_the_library(tmp_path: Path) -> None:
    usual, fused = both()
    copied = copy.deepcopy(fused.model)
    assert stack_of(copied) is None and len(copied.model.layers) == len(copied.model.layers[:]) == 2
    assert torch.equal(logits_of(Target(copied), prompt_of(9)), logits_of(usual, prompt_of(9)))
    assert fused.model.state_dict().keys() == usual.model.state_dict().keys()
    torch.save(fused.model, tmp_path / "model.pt")
    assert stack_of(torch.load(tmp_path / "model.pt", weights_only=False)) is None
    assert list(fused.model.model.layers[:1]) == [fused.model.model.layers[0]]
    for module in fused.model.modules():
        if isinstance(module, StackedLayers):
            module.stack = None
    fused.use_whole_passes(None)
    assert torch.equal(logits_of(fused, prompt_of(9)), logits_of(usual, prompt_of(9)))


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
def test_loading_uses_compiled_layers_unless_told_otherwise(
    tmp_path: Path, changes: dict[str, Any], expected: bool
) -> None:
    model_of(dtype=torch.bfloat16).bfloat16().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path)
    loaded = load(ModelConfig(str(tmp_path), device="cpu", **changes))
    assert (stack_of(loaded.target.model) is not None) == expected
    assert loaded.target.log.passes == 0 and loaded.target.log.seconds == 0


def test_costs_of_passes_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path))
    usual, fused = both()
    assert _saved_file(usual) != _saved_file(fused)


def test_rows_that_the_cache_has_no_room_for_are_the_librarys() -> None:
    _, fused = both()
    cache = fused.allocate(1, 64).slots[0].kv
    place = torch.rand(1, 2, 16)
    given = {"position_embeddings": (place, place), "cache": cache}
    with torch.inference_mode():
        for length, expected in ((62, True), (63, False)):
            cache.length = length
            mask = torch.zeros(1, 1, 2, length + 2)
            assert stack(fused).takes(torch.rand(1, 2, 64), {**given, "attention_mask": mask}) == expected
        cache.length = 3
        for rows in ((2, 1, 64), (1, 2, 128), (1, 0, 64), (1, 1, 64)):
            mask = torch.zeros(rows[0], 1, rows[1], 3 + rows[1])
            assert not stack(fused).takes(torch.rand(rows), {**given, "attention_mask": mask})
