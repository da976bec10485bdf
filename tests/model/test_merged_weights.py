"""The fused pass merges weights of the user's model: nothing of that shows to whoever saves, trains or shares it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch.nn import Parameter

from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import output_tokens, run
from tests.support.families import model_of
from tests.support.oracle import prompt_of
from tests.support.rehearsed import direct

PROMPT = prompt_of(20)


def own_model() -> Any:
    """A copy without the hooks by which targets of other tests watch hidden states."""
    model = copy.deepcopy(model_of("llama"))
    for module in model.modules():
        module._forward_hooks.clear()
    return model


def fused() -> Target:
    target = Target(own_model(), direct)
    assert target.is_fused
    return target


def answer_of(target: Target) -> list[int]:
    return output_tokens(run(target, PROMPT, SamplingConfig()))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_fused_model_can_be_trained() -> None:
    target = fused()
    model, before = target.model, answer_of(target)
    ids = torch.tensor([PROMPT])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    after = answer_of(target)
    assert after != before
    assert after == answer_of(Target(copy.deepcopy(model)))


def test_weights_that_were_made_in_inference_mode_are_merged() -> None:
    expected = answer_of(Target(own_model(), never))
    with torch.inference_mode():
        model = own_model()
    target = Target(model, direct)
    assert target.is_fused
    assert answer_of(target) == expected
    assert all(weight.is_inference() for weight in model.parameters())


def test_a_fused_model_is_saved_as_any_other(tmp_path: Path) -> None:
    """Also by code that refuses tensors in one storage, leaves all but one out, or saves the storage as a whole."""
    plain, target = own_model(), fused()
    model = target.model
    for name, one in {"plain": plain, "fused": model}.items():
        one.save_pretrained(tmp_path / name)
        save_model(one, str(tmp_path / f"{name}.safetensors"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "fused")]
    assert files[0] == files[1]
    alone = load_file(tmp_path / "fused.safetensors")
    assert alone.keys() == load_file(tmp_path / "plain.safetensors").keys() == model.state_dict().keys()
    assert all(torch.equal(alone[name], weight) for name, weight in plain.state_dict().items())
    storages = [weight.untyped_storage().data_ptr() for weight in model.state_dict().values()]
    assert len(set(storages)) == len(storages)
    assert len(saved(model.state_dict())) == len(saved(plain.state_dict()))
    for one in (copy.deepcopy(model), torch.load(io.BytesIO(saved(model)), weights_only=False)):
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), plain.parameters(), strict=True))


def test_targets_of_one_model_share_what_is_merged() -> None:
    first = fused()
    model: Any = first.model
    places = [weight.data_ptr() for weight in model.parameters()]
    second = Target(model, direct)
    assert second.is_fused
    assert places == [weight.data_ptr() for weight in model.parameters()]
    counts = []
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data = torch.randn_like(model.model.layers[0].mlp.up_proj.weight) / 2
    expected = answer_of(Target(copy.deepcopy(model)))
    for _ in range(3):
        assert answer_of(first) == answer_of(second) == expected
        counts.append((first.changes, second.changes))
    assert counts[0] == counts[-1], "neither takes the other's merged weights for a change"


def bias_queries(model: Any) -> None:
    matmul = model.model.layers[0].self_attn.q_proj
    matmul.bias = Parameter(torch.ones(matmul.out_features))


def bias_values(model: Any) -> None:
    """A bias that changes nothing as yet."""
    matmul = model.model.layers[0].self_attn.v_proj
    matmul.bias = Parameter(torch.zeros(matmul.out_features))


def share_between_layers(model: Any) -> None:
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight


def use_one_buffer(model: Any) -> None:
    """As an optimizer does that updates all weights at once."""
    weights = [model.model.layers[0].self_attn.q_proj.weight, model.lm_head.weight]
    buffer, first = torch.cat([weight.data.flatten() for weight in weights]), 0
    for weight in weights:
        weight.data = buffer[first : first + weight.numel()].view(weight.shape)
        first += weight.numel()


@pytest.mark.parametrize("change", [bias_queries, bias_values, share_between_layers, use_one_buffer])
def test_other_weights_stay_where_they_are(change: Callable[[Any], None]) -> None:
    model = own_model()
    change(model)
    matmuls = [getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    places = [weight.data_ptr() for matmul in matmuls for weight in matmul.parameters()]
    target = Target(model, direct)
    assert target.is_fused, "matmuls that cannot be merged are called one by one"
    assert places == [weight.data_ptr() for matmul in matmuls for weight in matmul.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1
    assert answer_of(target) == answer_of(Target(copy.deepcopy(model)))


def test_hidden_states_that_another_target_watches_change_nothing() -> None:
    model = own_model()
    first = Target(model, direct)
    first.watch_hidden()
    second = Target(model, direct)
    fused_before = second.is_fused
    assert answer_of(second) == answer_of(first) == answer_of(Target(model))
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    second.notice_changes()
    assert (fused_before, second.is_fused) == (True, False), "the second hook changes what a layer gives"
    assert answer_of(second) == answer_of(Target(model))


class Packed(torch.Tensor):
    """A weight of a library's own class, without memory of its own, as those of torchao are."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
        made.numbers = numbers.to(torch.bfloat16)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].numbers.to(args[0].dtype), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert func is torch.ops.aten.detach.default, func
        return Packed(args[0].numbers)


@pytest.mark.parametrize("names", [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]])
def test_weights_of_other_classes_are_left_to_their_own_code(names: list[str]) -> None:
    model = own_model()
    for layer in model.model.layers:
        for name in names:
            owner = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            matmul = getattr(owner, name)
            matmul.weight = Parameter(Packed(matmul.weight.data), requires_grad=False)
    expected = answer_of(Target(model))
    target = Target(model, direct)
    assert target.is_fused
    assert answer_of(target) == expected
