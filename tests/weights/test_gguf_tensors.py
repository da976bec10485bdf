"""Weights that a store reads from GGUF files equal what transformers reads, bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.transformers_internals import empty_model
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_names import gguf_store
from tests.support.gguf_architectures import (
    ARCHITECTURES,
    BLOCK_SCALES,
    LAYERS,
    READABLE,
    TORCH_ARCHITECTURES,
    TORCH_FORMATS,
    write_architecture,
    write_metadata,
)
from tests.support.gpt_oss_gguf import write_gpt_oss
from tests.support.read_weights import loaded_by_library, store_differences

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q2_K", "IQ4_XS", "Q8_0+IQ4_XS"]
"""Formats of the matrices of a file; no compiled matmul reads Q2_K and IQ4_XS."""
EXPANDED = {"qwen35": r"linear_attn\.out_proj", "gpt2": r"attn|mlp"}
"""Architectures with weights in another order of columns, or transposed: patterns of their names."""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", READABLE)
def test_each_tensor_equals_the_librarys(case: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, case, *kind.split("+"))
    expected = loaded_by_library(path, settings)
    store = gguf_store(GGUFFile.open(path), settings, empty_model(settings))
    assert store_differences(store, expected) == []


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", ["llama", "lfm2"])
@pytest.mark.parametrize("kind", sorted(BLOCK_SCALES))
def test_each_block_format_is_expanded_like_the_librarys(kind: str, case: str, tmp_path: Path) -> None:
    """transformers expands blocks by numpy, and by torch for some architectures."""
    if case == "lfm2" and TORCH_FORMATS and kind not in TORCH_FORMATS:
        pytest.skip(f"transformers doesn't read {kind} by torch")
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, case, kind)
    store = gguf_store(GGUFFile.open(path), settings, empty_model(settings))
    assert store_differences(store, loaded_by_library(path, settings)) == []


@pytest.mark.one_in(2)
@pytest.mark.skipif(not EXPANDS_FLOAT16, reason="blocks are expanded here")
@pytest.mark.parametrize("case", READABLE)
def test_matrices_stay_in_blocks(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, case, "Q8_0")
    store = gguf_store(GGUFFile.open(path), settings, empty_model(settings))
    blocks = {name: weight for name, weight in store.items() if {piece.format for piece in weight.pieces} == {"Q8_0"}}
    pattern = next((pattern for start, pattern in EXPANDED.items() if case.startswith(start)), "$^")
    assert {name for name, weight in blocks.items() if not weight.stays_packed} == {
        name for name in blocks if re.search(pattern, name)
    }
    assert len(blocks) >= LAYERS


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K", "F16"), ("Q4_K", "F16", "Q6_K")])
@pytest.mark.parametrize("case", ["qwen2moe", "minimax-m2"])
def test_projections_in_different_formats_are_joined(case: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, case, *kinds)
    store = gguf_store(GGUFFile.open(path), settings, empty_model(settings))
    assert any(len({piece.format for piece in weight.pieces}) > 1 for weight in store.values())
    assert store_differences(store, loaded_by_library(path, settings)) == []


@pytest.mark.parametrize("case", ["gpt2", "qwen2moe", "lfm2"])
def test_parts_are_read_like_a_whole_file(case: str, tmp_path: Path) -> None:
    """Projections that become one weight may lie in two parts. transformers reads only whole files."""
    whole, parts = tmp_path / "whole.gguf", tmp_path / "parts.gguf"
    settings = write_architecture(whole, case, "Q8_0")
    write_architecture(parts, case, "Q8_0", tensors_of_part=5)
    first = min(tmp_path.glob("parts-*.gguf"))
    store = gguf_store(GGUFFile.open(first), settings, empty_model(settings))
    assert len(store.files) > 2
    assert store_differences(store, loaded_by_library(whole, settings)) == []


@pytest.mark.parametrize(("experts", "others"), [("MXFP4", "Q8_0"), ("F32", "F32"), ("Q8_0", "Q4_0")])
def test_gpt_oss_is_read_as_it_was_written(experts: str, others: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gpt_oss(path, experts, others)
    store = gguf_store(GGUFFile.open(path), model.config, empty_model(model.config))
    assert store_differences(store, model) == []


def test_a_parameter_without_a_suffix_is_found_under_a_name_with_one(tmp_path: Path) -> None:
    """llama.cpp writes the scales of Gemma 4's layers as weights, under a name that transformers does not look for."""
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, "gemma4", "F32")
    expected = loaded_by_library(path, settings)
    file = GGUFFile.open(path)
    renamed = {name.replace("output_scale", "output_scale.weight"): piece for name, piece in file.tensors.items()}
    assert renamed != file.tensors
    store = gguf_store(replace(file, tensors=renamed), settings, empty_model(settings))
    assert store_differences(store, expected) == []


@pytest.mark.parametrize("case", sorted(set(ARCHITECTURES) - set(READABLE)))
def test_the_library_cannot_read_the_other_architectures(case: str, tmp_path: Path) -> None:
    """If it learns to, their tensors are to be compared as well."""
    path = tmp_path / "model.gguf"
    write_metadata(path, ARCHITECTURES[case])
    with pytest.raises((ValueError, NotImplementedError), match=case.partition("-")[0]):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)


def test_every_decoder_that_the_library_reads_has_a_case() -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    others = {"general", "tokenizer", "gptoss", "t5", "umt5"}  # no architectures, tested above, and encoders
    of_library = {*GGUF_SUPPORTED_ARCHITECTURES, *TORCH_ARCHITECTURES}
    cases = {*ARCHITECTURES, *(architecture.name for architecture in ARCHITECTURES.values())}
    assert {_letters(name) for name in of_library} - {_letters(name) for name in cases} == others


def _letters(name: str) -> str:
    return re.sub(r"\W|_", "", name)
