"""Multimodal checkpoints that are asked about text: loaded by their own class, exact by command line and hook."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPConfig

from hdtool.data import demo
from hdtool.data.errors import FamilyError, OptionError
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.target.load import load
from tests.support.multimodal import TEXT, multimodal_model
from tests.support.oracle import prompt_of
from tests.support.trees import WrongDrafter

PROMPT = prompt_of(30)
MAX_NEW_TOKENS = 24
OPTIONS = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": 0}


def expected_from(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    answer: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, len(PROMPT) :].tolist()
    return answer


@pytest.mark.parametrize("kind", TEXT)
def test_the_hook_is_exact_with_prompts_of_text(kind: str) -> None:
    model: Any = multimodal_model(kind)
    ids = torch.tensor([PROMPT])
    expected = expected_from(model)
    wrong_drafter = WrongDrafter(len(PROMPT), expected, 97, 3)
    given = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    if kind not in ("qwen2_5_vl", "qwen3_vl"):  # only these have processors that mark tokens
        del given["mm_token_type_ids"]
    found = model.generate(ids, **given, custom_generate=Generator(wrong_drafter), **OPTIONS)
    assert found[0, len(PROMPT) :].tolist() == expected


def test_images_are_refused_by_name() -> None:
    model: Any = multimodal_model("llava")
    ids = torch.tensor([PROMPT])
    given = {"attention_mask": torch.ones_like(ids), "pixel_values": torch.zeros(1, 3, 16, 16)}
    with pytest.raises(OptionError, match="image input is given, but it reads text alone"):
        model.generate(ids, custom_generate=Generator(), **given, **OPTIONS)


def test_token_types_of_images_are_refused_by_name() -> None:
    model: Any = multimodal_model("qwen3_vl")
    ids = torch.tensor([PROMPT])
    given = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.ones_like(ids)}
    with pytest.raises(OptionError, match="mm_token_type_ids is given"):
        model.generate(ids, custom_generate=Generator(), **given, **OPTIONS)


@pytest.mark.parametrize("kind", TEXT)
def test_a_multimodal_checkpoint_loads_and_is_exact(kind: str, tmp_path: Path) -> None:
    model = multimodal_model(kind)
    loaded = load(ModelConfig(str(saved(model, tmp_path)), dtype="float32"))
    expected = expected_from(model)
    wrong_drafter = WrongDrafter(len(PROMPT), expected, 97, 3)
    steps = decode(
        loaded.target, PROMPT, Sampler(SamplingConfig(), PROMPT), max_new_tokens=MAX_NEW_TOKENS, drafter=wrong_drafter
    )
    assert [token for step in steps for token in step.tokens] == expected


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.MODEL) / name, folder)
    return folder


def test_a_type_that_the_library_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    with pytest.raises(FamilyError, match=r"is of type 'from_the_future', which transformers \S+ does not know"):
        load(str(tmp_path))


def test_a_type_that_generates_no_text_is_refused_without_blaming_the_folder(tmp_path: Path) -> None:
    CLIPConfig().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.MODEL) / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FamilyError, match=r"models of type 'clip' cannot be used: .* no class that generates text"):
        load(str(tmp_path))
