"""Weights that a store reads from safetensors files equal what transformers reads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from hdtool.data.progress import progress_bar
from hdtool.runtime.model.transformers_internals import empty_model
from hdtool.runtime.weights.fill_model import fill, fits
from hdtool.runtime.weights.safetensors_files import safetensors_store
from tests.support.families import FAMILIES, random_model
from tests.support.read_weights import differences, loaded_by_library, store_differences
from tests.sweep.models import initial_model
from tests.sweep.special import OTHERS
from tests.sweep.types import every_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED, SHARDED = "mixed", "sharded"
FILE = "model.safetensors"
MAX_SHARD_SIZE = 20_000
KINDS = set(every_type()) - set(OTHERS)
CONVERTED = {
    *("bailing_hybrid", "ernie4_5_vl_moe", "gemma3n_text", "hrm_text", "inkling2", "inkling_mm_model", "kimi_k25"),
    *("minimax_m3_vl", "mistral_large4", "molmo2", "qwen3_vl_moe", "qwen4_exp_text", "step3p7", "unlimited_ocr"),
}
"""Types that together have each kind of conversion: joined, split, interleaved, permuted, transposed and renamed."""


@torch.no_grad()
def saved(model: PreTrainedModel, folder: Path, layout: str = "float32") -> Path:
    """Save a model with other random weights, so that no vector is constant; return the folder."""
    torch.manual_seed(0)
    for weight in model.state_dict().values():
        if weight.is_floating_point():
            weight.normal_()
    if DTYPES.get(layout, torch.float32) != torch.float32:
        model.to(DTYPES[layout])  # type: ignore[arg-type]
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE if layout == SHARDED else "5GB")
    if layout == MIXED:
        dtypes = list(DTYPES.values())
        weights = load_file(folder / FILE)
        rewrite(folder, {name: weight.to(dtypes[crc32(name.encode()) % 3]) for name, weight in weights.items()})
    return folder


def rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / FILE, metadata={"format": "pt"})


def assert_as_the_library_reads(folder: Path) -> None:
    expected, settings = loaded_by_library(folder), AutoConfig.from_pretrained(folder)
    model = empty_model(settings)
    store = safetensors_store(folder, settings, model)
    assert store is not None and fits(store, model)
    with progress_bar(store.bytes, "reading", quiet=True) as bar:
        fill(model, store, folder, bar, None)
    weights = model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert differences(lambda name: weights[name].float(), weights, expected) == []


@pytest.mark.each_value
@pytest.mark.parametrize("layout", [*DTYPES, MIXED, SHARDED])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_tensor_equals_the_librarys(name: str, layout: str, tmp_path: Path) -> None:
    folder = saved(FAMILIES[name](), tmp_path, layout)
    assert (folder / FILE).is_file() == (layout != SHARDED)
    assert_as_the_library_reads(folder)


@pytest.mark.parametrize("kind", sorted(CONVERTED & KINDS))
def test_each_conversion_is_applied_like_the_librarys(kind: str, tmp_path: Path) -> None:
    assert_as_the_library_reads(saved(initial_model(kind), tmp_path))


@pytest.mark.one_in(60)
@pytest.mark.parametrize("kind", sorted(KINDS - CONVERTED))
def test_every_type_is_read_like_the_library_does(kind: str, tmp_path: Path) -> None:
    try:
        folder = saved(initial_model(kind), tmp_path)
        loaded_by_library(folder)
    except Exception as error:
        pytest.skip(f"the library can't read what it saves: {error}")
    assert_as_the_library_reads(folder)


@pytest.mark.parametrize("kind", ["llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3"])
def test_multimodal_models_are_read_whole(kind: str, tmp_path: Path) -> None:
    assert_as_the_library_reads(saved(initial_model(kind), tmp_path, "bfloat16"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_tied_weights_are_stored_once(name: str, tmp_path: Path) -> None:
    assert_as_the_library_reads(saved(_tied(name), tmp_path))


def test_experts_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """The tenth expert's name comes before the second one's in the alphabet."""
    model = random_model("Qwen3Moe", num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16)
    assert_as_the_library_reads(saved(model, tmp_path))


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_weights_may_be_stored_twice(is_equal: bool, tmp_path: Path) -> None:
    """transformers keeps both if they differ."""
    folder = saved(random_model("Llama"), tmp_path)
    settings, weights = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    if is_equal:
        rewrite(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert_as_the_library_reads(folder)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_checkpoints_of_models_without_a_head_are_read(name: str, tmp_path: Path) -> None:
    """Their names lack the prefix of the model's parameters."""
    model: Any = _tied(name)
    folder = saved(model, tmp_path)
    prefix = f"{model.base_model_prefix}."
    weights = load_file(folder / FILE)
    assert all(weight.startswith(prefix) for weight in weights)
    rewrite(folder, {weight.removeprefix(prefix): values for weight, values in weights.items()})
    assert_as_the_library_reads(folder)


def test_tensors_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    folder = saved(random_model("Llama"), tmp_path)
    weights = load_file(folder / FILE)
    expected, settings = loaded_by_library(folder), AutoConfig.from_pretrained(folder)
    rewrite(folder, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "other": torch.ones(2)})
    store = safetensors_store(folder, settings, empty_model(settings))
    assert store is not None
    assert store_differences(store, expected) == []


def _tied(name: str) -> PreTrainedModel:
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
        "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    }
    kind, settings = made[name]
    return random_model(kind, tie_word_embeddings=True, **settings)
