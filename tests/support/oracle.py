"""What everything is compared with: the plain library, asked in the plainest way."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.families import VOCABULARY


def prompt_of(length: int) -> list[int]:
    """A random prompt, the same one for the same length."""
    ids: list[int] = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return ids


def generated(model: Any, prompt: list[int], most: int, **options: Any) -> list[int]:
    """What ``model.generate`` says, greedy unless told otherwise."""
    asked = torch.tensor([prompt], device=model.device)
    options = {"do_sample": False} | options
    said = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=most, **options)
    ids: list[int] = said[0, len(prompt) :].tolist()
    return ids


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits after ``ids``, computed from nothing but them."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within rounding, judged against how far the logits spread.

    A wrong mask or position moves them by tenths of their spread. In float64 nothing but the order
    of sums may differ; in float32 the same shows some ten thousand times as large.
    """
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-3
    distance = (found - expected).abs().max() / expected.std()
    assert distance < tolerance, f"logits are off by {distance:.2g} of their spread"
