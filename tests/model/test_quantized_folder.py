"""Checkpoints that are quantized to blocks on loading: the rounding of ggml, exact products, and a folder made once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType
from gguf.quants import quantize

from hdtool.cli.app import run as command
from hdtool.data import demo
from hdtool.data.errors import HdtoolError, ModelError, OptionError
from hdtool.data.home import artifacts_at_home
from hdtool.runtime.kernels.compact_weight import is_packed
from hdtool.runtime.kernels.packed_matrix import Q4_0, Q8_0, quantize_matrix
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target import load as loading
from hdtool.runtime.target.load import load, load_stock
from hdtool.runtime.weights import quantized_checkpoints
from hdtool.runtime.weights.model_in_memory import checkpoint_in_memory
from tests.support.decoding import assert_lossless
from tests.support.fused import compiled
from tests.support.gguf_files import tiny_llama, vocabulary
from tests.support.locks import deleted_lock_files
from tests.support.packed_blocks import needs_blocks

pytestmark = [needs_blocks, pytest.mark.usefixtures("home")]
SIZE = len(vocabulary()["model"]["vocab"])
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {**SHAPE, "vocab_size": SIZE}
TOKENS = torch.tensor([[3, 5, 8, 13, 21, 34, 55]])


def checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Path:
    place = folder / "tiny"
    model: Any = tiny_llama(seed, **{**WIDE, **changed})
    model.to(dtype).save_pretrained(place)
    for file in demo.MODEL.iterdir():
        if "tokenizer" in file.name or "template" in file.name:
            shutil.copy(file, place)
    return place


def config_of(place: Path, scheme: str = "q8_0", **options: Any) -> ModelConfig:
    return ModelConfig(str(place), device="cpu", quantization=scheme, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Products of torch add in another order."""
    assert torch.linalg.vector_norm(found - expected) < 1e-5 * torch.linalg.vector_norm(expected)


def formats(model: Any) -> dict[str, str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: weight.stored.format.name for name, weight in named if is_packed(weight)}


def folder_made() -> Path:
    (folder,) = (path for path in artifacts_at_home("quantized").iterdir() if path.is_dir())
    return folder


MANY_ZEROS = st.one_of(st.just(0.0), st.sampled_from([1.0, -1.0, 0.5, -8.0, 127.0]), st.floats(-1e4, 1e4, width=32))


@given(arrays.arrays(np.float32, (3, 64), elements=MANY_ZEROS), st.sampled_from([Q8_0, Q4_0]), st.booleans())
@settings(deadline=None)
def test_blocks_are_those_of_the_library(numbers: np.ndarray[Any, Any], format: Any, narrow: bool) -> None:
    """Numbers in 16 bits have many that are equally large, with both signs."""
    weight = torch.from_numpy(numbers)
    weight = weight.bfloat16() if narrow else weight
    with np.errstate(all="ignore"):
        expected = quantize(weight.float().numpy(), GGMLQuantizationType[format.name])
    matrix = quantize_matrix(weight, format)
    assert matrix is not None and np.array_equal(matrix.blocks.numpy(), expected)


@pytest.mark.parametrize("format", [Q8_0, Q4_0])
def test_blocks_of_negative_zeros_are_those_of_the_library(format: Any) -> None:
    matrix = quantize_matrix(torch.full((2, 64), -0.0), format)
    expected = quantize(np.full((2, 64), -0.0, np.float32), GGMLQuantizationType[format.name])
    assert matrix is not None and np.array_equal(matrix.blocks.numpy(), expected)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("format", [Q8_0, Q4_0])
def test_numbers_without_a_scale_in_float16_are_left(number: float, format: Any) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = number
    assert quantize_matrix(weight, format) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["q8_0", "q4_0"])
def test_the_model_computes_with_the_rounded_weights(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    place = checkpoint(tmp_path, dtype=dtype)
    target = load(config_of(place, scheme)).target
    found, model = formats(target.model), tiny_llama(0, **WIDE)
    original: Any = model.to(dtype=dtype)  # type: ignore[call-arg]
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(found) == 16 and {name for name, kind in found.items() if kind == "Q8_0"} >= tables
    for name, kind in found.items():
        assert kind == ("Q8_0" if name in tables or scheme == "q8_0" else "Q4_0")
        weight = original.get_parameter(name).detach().float().numpy()
        blocks = target.model.get_parameter(name).stored.blocks.numpy()
        assert np.array_equal(blocks, quantize(weight, GGMLQuantizationType[kind])), name
    stock = load_stock(config_of(place, scheme))
    assert not formats(stock)
    assert_near(logits(target.model), logits(stock))
    shutil.copytree(place, tmp_path / "wide")
    stock.save_pretrained(tmp_path / "wide")
    wide = load(ModelConfig(str(tmp_path / "wide"), device="cpu", dtype="float32")).target
    assert compiled(target) and not formats(wide.model)
    assert torch.equal(logits(target.model), logits(wide.model)), "products have the bits of the expanded weights"


@pytest.mark.parametrize("tied", [False, True])
def test_tied_tables_and_odd_columns(tied: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = checkpoint(tmp_path, tie_word_embeddings=tied, intermediate_size=96)
    model = load(config_of(place, "q4_0")).target.model
    odd = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    matrices = {name for name, one in model.named_parameters(remove_duplicate=False) if one.dim() == 2}
    assert matrices - formats(model).keys() == odd
    assert "note: 2 of 1" in (said_ := capfd.readouterr().err) and "columns are no multiple of 64" in said_
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert_near(logits(model), logits(load_stock(config_of(place, "q4_0"))))


@pytest.mark.parametrize(("scheme", "activations"), [("q8_0", "int8"), ("q4_0", "float32")])
def test_drafted_answers_are_those_of_plain_decoding(scheme: str, activations: str, tmp_path: Path) -> None:
    place, prompt = checkpoint(tmp_path), [token % SIZE for token in range(3, 600, 29)]
    target = load(config_of(place, scheme, activations=activations)).target
    assert compiled(target).activations_are_int8 == (activations == "int8")
    assert_lossless(target, prompt)


def test_later_starts_read_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = checkpoint(tmp_path)
    first = logits(load(config_of(place)).target.model)
    assert capfd.readouterr().err.count("note: quantizing") == 1
    monkeypatch.setattr(quantized_checkpoints, "_write", lambda *_: pytest.fail("the checkpoint was quantized again"))
    assert torch.equal(logits(load(config_of(place)).target.model), first)
    assert not capfd.readouterr().err


def test_a_changed_checkpoint_is_quantized_again(tmp_path: Path) -> None:
    """The new file has the name, the size and the time of the old one."""
    place = checkpoint(tmp_path)
    weights = place / "model.safetensors"
    before, old = weights.stat(), logits(load(config_of(place)).target.model)
    made = folder_made()
    weights.write_bytes((checkpoint(tmp_path / "other", seed=1) / weights.name).read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    model = load(config_of(place)).target.model
    assert not torch.equal(logits(model), old)
    assert_near(logits(model), logits(load_stock(config_of(place))))
    assert folder_made() != made, "what nothing has any more takes no room"


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = checkpoint(tmp_path)

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(quantized_checkpoints, "save_file", full)
        with pytest.raises(ModelError, match=r"quantizing .* failed .*No space left.*: make room, or let HDTOOL_HOME"):
            load(config_of(place))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
        with pytest.raises(ModelError, match=r"needs [\d,]+ bytes in .*, whose disk has 5: make room"):
            load(config_of(place))
    assert not [path for path in artifacts_at_home("quantized").iterdir() if path.is_dir()]


def test_damaged_weights_are_named_and_leave_no_copy(tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    weights = load_file(place / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][2, 3] = torch.nan
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    for config in (config_of(place), ModelConfig(str(place), device="cpu")):
        with pytest.raises(ModelError, match=r"tiny is damaged: model.layers.1.mlp.down_proj.weight holds NaN: get it"):
            load(config)
    assert not [path for path in artifacts_at_home("quantized").iterdir() if path.is_dir()]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        OptionError, match="--dtype must be left out with --quantization q4_0, which computes in float32"
    ):
        ModelConfig(quantization="q4_0", dtype="bfloat16")
    with pytest.raises(OptionError, match="--device-map must be left out with --quantization q8_0"):
        ModelConfig(quantization="q8_0", device_map="auto")
    place = checkpoint(tmp_path)
    settings_file = place / "config.json"
    before = settings_file.read_text()
    told = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    settings_file.write_text(json.dumps({**json.loads(before), "quantization_config": told}))
    with pytest.raises(OptionError, match="quantized already, with bitsandbytes: leave out --quantization q8_0"):
        load(config_of(place))
    settings_file.write_text(before)
    (place / "model.safetensors").unlink()
    with pytest.raises(HdtoolError, match="get the checkpoint again, whole"):
        load(config_of(place))
    monkeypatch.setattr(loading, "EXPANDS_FLOAT16", False)
    with pytest.raises(OptionError, match="--quantization q8_0 is for one process on a CPU that converts float16"):
        load(config_of(place))


def test_the_model_is_recognised_until_its_weights_change(tmp_path: Path) -> None:
    loaded, plain = load(config_of(place := checkpoint(tmp_path))), load(ModelConfig(str(place), device="cpu"))
    model: Any = loaded.target.model
    assert loaded.checkpoint == plain.checkpoint, "stores of the checkpoint are found"
    found = checkpoint_in_memory(model)
    assert found and loaded.checkpoint and found.fingerprint == loaded.checkpoint.fingerprint
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data = layer.weight.data + 1
    assert checkpoint_in_memory(model) is None


def test_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = str(checkpoint(tmp_path))
    options = ("--prompt", "Say it.", "--max-new-tokens", "8", "--method", "ar", "--json")
    texts = []
    for name in ("--quantize", "--quantization"):
        assert command(["generate", "--model", place, name, "q4_0", *options]) == 0
        texts.append(json.loads(capfd.readouterr().out.splitlines()[-1])["text"])
    assert texts[0] == texts[1]
    assert command(["stores", "--json"]) == 0
    (item,) = json.loads(capfd.readouterr().out)["stores"]
    assert item["kind"] == "quantized" and item["name"].startswith("quantized-q4_0-")
    with deleted_lock_files() as deleted:
        assert command(["stores", "remove", item["name"], "--yes"]) == 0
    assert len(deleted) == 1 and not list(artifacts_at_home("quantized").glob("[!.]*"))
