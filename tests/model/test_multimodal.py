"""Multimodal checkpoints that are asked about text: loaded by their own class, exact by command line and hook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig

from hdtool.data.errors import FamilyError, OptionError
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from tests.support.decoding import assert_lossless
from tests.support.families import VOCABULARY, saved
from tests.support.oracle import generated, prompt_of
from tests.support.trees import WrongDrafter
from tests.sweep.models import tiny_model

PROMPT = prompt_of(30)
MAX_NEW_TOKENS = 24
KINDS = ("llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hook_is_exact_with_prompts_of_text(kind: str) -> None:
    model = tiny_model(kind)
    expected = generated(model, PROMPT, MAX_NEW_TOKENS)
    marks = {"mm_token_type_ids": torch.zeros(1, len(PROMPT), dtype=torch.int64)}
    if kind not in ("qwen2_5_vl", "qwen3_vl"):  # only these have processors that mark tokens
        marks = {}
    drafting = Generator(WrongDrafter(len(PROMPT), expected, VOCABULARY, 3))
    assert generated(model, PROMPT, MAX_NEW_TOKENS, custom_generate=drafting, **marks) == expected


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        ("llava", {"pixel_values": torch.zeros(1, 3, 336, 336)}, "image input is given, but it reads text alone"),
        (
            "qwen3_vl",
            {"mm_token_type_ids": torch.ones(1, len(PROMPT), dtype=torch.int64)},
            "mm_token_type_ids is given",
        ),
    ],
)
def test_images_are_refused_by_name(kind: str, given: dict[str, torch.Tensor], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        generated(tiny_model(kind), PROMPT, MAX_NEW_TOKENS, custom_generate=Generator(), **given)


@pytest.mark.parametrize("kind", KINDS)
def test_a_multimodal_checkpoint_loads_and_is_exact(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    loaded = load(ModelConfig(str(saved(model, tmp_path)), dtype="float32"))
    assert_lossless(loaded.target, PROMPT, max_new_tokens=24, expected=generated(model, PROMPT, 24))


def test_a_type_that_the_library_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    with pytest.raises(FamilyError, match=r"is of type 'from_the_future', which transformers \S+ does not know"):
        load(str(tmp_path))


def test_a_type_that_generates_no_text_is_refused_without_blaming_the_folder(tmp_path: Path) -> None:
    saved(CLIPConfig(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FamilyError, match=r"models of type 'clip' cannot be used: .* no class that generates text"):
        load(str(tmp_path))
