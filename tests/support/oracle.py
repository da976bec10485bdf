"""Reference results from transformers: greedy ``generate``, and logits of a pass without a cache."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.families import VOCABULARY


def prompt_of(length: int) -> list[int]:
    """Return a random prompt, which depends only on its length."""
    ids: list[int] = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return ids


def generated(model: Any, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Return the answer of ``model.generate``, greedy unless the options say otherwise."""
    asked = torch.tensor([prompt], device=model.device)
    options = {"do_sample": False} | options
    said = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=max_new_tokens, **options)
    ids: list[int] = said[0, len(prompt) :].tolist()
    return ids


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits after ``ids``, computed without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def all_logits(model: Any, length: int) -> torch.Tensor:
    """Return the logits after each token of a prompt, computed without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt_of(length)]), use_cache=False).logits
    return logits


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal within rounding, relative to their standard deviation.

    A wrong mask or position changes logits by tenths of it. In float64, only the order of sums may differ; in float32,
    such differences are about ten thousand times as large.
    """
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-3
    distance = (found.to(expected.device) - expected).abs().max() / expected.std()
    assert distance < tolerance, f"logits are off by {distance:.2g} of their spread"
