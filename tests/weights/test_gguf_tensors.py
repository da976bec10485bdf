"""Weights that a store reads from GGUF files equal what transformers reads, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hdtool.runtime.weights.assemble import empty_model
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_names import gguf_store
from tests.support.gguf_architectures import ARCHITECTURES, READABLE, write_architecture, write_metadata
from tests.support.gpt_oss_gguf import write_gpt_oss
from tests.support.read_weights import differences, loaded_by_library

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q2_K", "IQ4_XS"]
"""Formats of matrices; no compiled matmul reads the last two."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", READABLE)
def test_each_tensor_equals_the_librarys(case: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    settings = write_architecture(path, case, kind)
    expected = loaded_by_library(path, settings)
    store = gguf_store(GGUFFile.open(path), settings, empty_model(settings))
    assert differences(store, expected) == []


@pytest.mark.parametrize(("experts", "others"), [("MXFP4", "Q8_0"), ("F32", "F32"), ("Q8_0", "Q4_0")])
def test_gpt_oss_is_read_as_it_was_written(experts: str, others: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gpt_oss(path, experts, others)
    store = gguf_store(GGUFFile.open(path), model.config, empty_model(model.config))
    assert differences(store, model) == []


@pytest.mark.parametrize("case", sorted(set(ARCHITECTURES) - set(READABLE)))
def test_the_library_cannot_read_the_other_architectures(case: str, tmp_path: Path) -> None:
    """If it learns to, their tensors are to be compared as well."""
    path = tmp_path / "model.gguf"
    write_metadata(path, ARCHITECTURES[case])
    with pytest.raises((ValueError, NotImplementedError), match=case):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)


def test_every_architecture_that_the_library_reads_has_a_case() -> None:
    from transformers.integrations.gguf import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    others = {"general", "tokenizer", "gpt_oss", "t5", "umt5"}
    """Tables of settings that are no architectures, gpt-oss, which is tested above, and encoders."""
    known = {name.replace("-", "_") for architecture in ARCHITECTURES.values() for name in _names(architecture.name)}
    assert {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS} - others - known == {"mistral"} - known


def _names(architecture: str) -> tuple[str, ...]:
    return architecture, architecture.replace("moe", "_moe")
