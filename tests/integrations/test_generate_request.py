"""What a call of ``generate`` may hold: all that would change an answer is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from hdtool.data.errors import OptionError
from hdtool.runtime.integrations.generate_request import GenerateRequest
from hdtool.runtime.integrations.hf_generate import Generator
from tests.support.families import model_of
from tests.support.oracle import prompt_of

PROMPT = prompt_of(6)
IDS = torch.tensor([PROMPT])


def read(model_type: str = "llama", **arguments: Any) -> GenerateRequest:
    settings = GenerationConfig(max_length=20)
    (row,) = GenerateRequest.rows_of(IDS, settings, StoppingCriteriaList(), arguments, model_type=model_type)
    return row


def positions(axes: int, start: int = 0, last: int | None = None) -> torch.Tensor:
    """Positions of the prompt for each axis; those of the last axis may start elsewhere."""
    found = torch.arange(start, start + len(PROMPT)).repeat(axes, 1, 1)
    if last is not None:
        found[-1] = torch.arange(last, last + len(PROMPT))
    return found


@pytest.mark.parametrize("value", [torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4), torch.empty(0)])
def test_every_foreign_tensor_counts_as_given(value: torch.Tensor) -> None:
    for name in ("pixel_values", "input_features"):
        foreign: dict[str, Any] = {name: value}
        with pytest.raises(OptionError, match=f"{name} is given"):
            read(**foreign)
    assert read(pixel_values=None, flag=False).prompt == PROMPT


def test_token_types_of_text_are_taken_where_zero_means_text() -> None:
    types = torch.zeros_like(IDS)
    assert read("gemma3", token_type_ids=types).prompt == PROMPT
    for family, value in (("gemma3", types + 1), ("gpt2", types), ("gpt2", types + 1)):
        with pytest.raises(OptionError, match="token_type_ids is given"):
            read(family, token_type_ids=value)


def test_token_types_of_zero_change_the_answers_of_models_that_embed_them() -> None:
    """The reason why they are refused: without the refusal the answer would differ from that of ``generate``."""
    model: Any = model_of("gpt2")
    options = {"max_new_tokens": 15, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    plain = model.generate(IDS, **options)
    typed = model.generate(IDS, token_type_ids=torch.zeros_like(IDS), **options)
    assert typed.tolist() != plain.tolist()
    with pytest.raises(OptionError, match="token_type_ids is given"):
        model.generate(IDS, token_type_ids=torch.zeros_like(IDS), custom_generate=Generator(), **options)


def test_positions_of_every_axis_are_checked() -> None:
    for fine in (positions(1), positions(3), positions(4), positions(1)[0], positions(1)[0, 0]):
        assert read(position_ids=fine).prompt == PROMPT
    wrong = [positions(3, last=2), positions(4, last=1), positions(1, start=1), torch.arange(len(PROMPT) + 1)[None]]
    for found in wrong:
        with pytest.raises(OptionError, match="position_ids are not 0, 1, 2"):
            read(position_ids=found)


def test_positions_of_padding_are_not_looked_at() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = torch.tensor([[1, 1, 0, 1, 2, 3]])
    assert read(attention_mask=mask, position_ids=padded).prompt == PROMPT[2:]
    with pytest.raises(OptionError, match="position_ids are not 0, 1, 2"):
        read(attention_mask=mask, position_ids=torch.stack([padded, padded + 1]))


@pytest.mark.parametrize("library", ["fsdp.is_fsdp_managed_module", "deepspeed.is_deepspeed_zero3_enabled", None])
def test_processes_that_wait_for_each_other_in_every_pass_are_refused(
    library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that makes fewer passes would stop all others; ``generate`` does not hand the argument on."""
    model: Any = model_of("llama")
    with pytest.raises(OptionError, match="synced_gpus is set"):
        model.generate(IDS, max_new_tokens=5, synced_gpus=True, custom_generate=Generator())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    if library:
        monkeypatch.setattr(f"transformers.integrations.{library}", lambda *_: True)
        with pytest.raises(OptionError, match="synced_gpus is set"):
            model.generate(IDS, max_new_tokens=5, custom_generate=Generator())
    alone = model.generate(IDS, max_new_tokens=5, synced_gpus=False, custom_generate=Generator())
    assert alone.shape[1] == len(PROMPT) + 5
