"""The fingerprint of a checkpoint: equal for copies in any files, different for a fine-tune."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hdtool.data import demo
from hdtool.data.stores.store_folder import read_manifest
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of
from hdtool.runtime.weights.model_in_memory import checkpoint_in_memory

DEMO = checkpoint_of(ModelConfig())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo.MODEL, tmp_path / "copy"))


def of(folder: Path) -> object:
    return checkpoint_of(ModelConfig(str(folder)))


def changed(folder: Path, part: str = "q_proj") -> None:
    """A fine-tune of one matrix in one layer."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if f".2.self_attn.{part}" in name)
    weights[name] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_the_demo_store_is_the_demo_models() -> None:
    assert DEMO and read_manifest(demo.MODEL_STORE).model == DEMO == load(ModelConfig()).checkpoint


def test_a_copy_is_the_same_and_a_fine_tune_of_one_matrix_is_not(copy: Path) -> None:
    assert of(copy) == DEMO
    before = (copy / "model.safetensors").stat().st_size
    changed(copy)
    assert (copy / "model.safetensors").stat().st_size == before
    assert of(copy) not in (DEMO, None)


def test_the_same_tensors_in_several_files(copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float16)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="4MB")
    assert len(list(copy.glob("*.safetensors"))) > 2
    assert of(copy) == DEMO
    next(copy.glob("*.safetensors")).unlink()
    assert of(copy) is None, "a shard is missing"


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch(copy: Path, tmp_path: Path, zipped: bool) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    assert of(copy) is None
    torch.save(weights, copy / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    first = of(copy)
    assert first and of(Path(shutil.copytree(copy, tmp_path / "again"))) == first
    name = next(name for name in weights if "down_proj" in name)
    weights[name] = weights[name] * 1.01
    torch.save(weights, copy / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert of(copy) not in (first, None)


def test_a_damaged_file_has_no_fingerprint(copy: Path) -> None:
    content = (copy / "model.safetensors").read_bytes()
    for damaged in (content[: len(content) // 2], content[:100], b"", b"\xff" * 1000):
        (copy / "model.safetensors").write_bytes(damaged)
        assert of(copy) is None


def test_an_adapter_beside_the_weights_counts(copy: Path) -> None:
    save_file({"lora": torch.ones(4)}, copy / "adapter_model.safetensors")
    assert of(copy) not in (DEMO, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_in_memory_is_recognised_by_its_files_in_any_dtype(dtype: torch.dtype, copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=dtype)
    assert checkpoint_in_memory(model) == DEMO
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1.5)
    assert checkpoint_in_memory(model) is None, "merged with an adapter, or trained"


def test_a_model_that_came_from_no_file_has_none(copy: Path) -> None:
    random = LlamaForCausalLM(LlamaConfig.from_pretrained(copy))
    assert checkpoint_in_memory(random) is None
    loaded = AutoModelForCausalLM.from_pretrained(copy)
    shutil.rmtree(copy)
    assert checkpoint_in_memory(loaded) is None
