"""GGUF files of models with short convolutions and recurrences, as far as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from tests.support.decoding import assert_lossless
from tests.support.gguf_architectures import write_architecture
from tests.support.oracle import generated, prompt_of
from tests.support.packed_blocks import needs_blocks

PROMPT, MAX_NEW_TOKENS = prompt_of(30), 24


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("case", ["lfm2", "mamba"])
def test_a_file_is_drafted_for_as_it_is_decoded(case: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_architecture(path, case, kind)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype="float32").eval()
    expected = generated(model, PROMPT, MAX_NEW_TOKENS, eos_token_id=None)
    assert len(set(expected)) > 4
    assert_lossless(load(ModelConfig(str(path))).target, PROMPT, max_new_tokens=MAX_NEW_TOKENS, expected=expected)


@needs_blocks
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_packed_weights_are_computed_in_compiled_passes(activations: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_architecture(path, "lfm2", "Q8_0")
    loaded = load(ModelConfig(str(path), device="cpu", activations=activations))
    compiled = loaded.target.compiled
    assert isinstance(compiled, CompiledModel) and compiled.activations_are_int8 == (activations == "int8")
    assert_lossless(loaded.target, PROMPT, max_new_tokens=MAX_NEW_TOKENS, seeds=range(3))
    assert compiled.passes > MAX_NEW_TOKENS
