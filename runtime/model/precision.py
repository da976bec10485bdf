"""A model computing more precisely for a while, to tell what rounding does to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIGHER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""The next type that computes much more precisely; there is none above float64."""


@contextmanager
def more_precise(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """All weights in the next higher precision, on ``device``; the very same tensors are put back at the end."""
    if model.dtype not in HIGHER:
        raise ModelError(f"nothing computes more precisely than {model.dtype}")
    higher = HIGHER[model.dtype]
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point()]
    kept = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            wider = tensor.dtype in HIGHER and torch.finfo(tensor.dtype).bits < torch.finfo(higher).bits
            tensor.data = tensor.data.to(device, higher if wider else tensor.dtype)
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data


@torch.inference_mode()
def logits_after(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """The logits that follow ``ids``, from one plain pass over nothing but them."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits: torch.Tensor = model(torch.tensor([ids], device=model.device), use_cache=False, **options).logits[0, -1]
    return logits


@torch.inference_mode()
def logits_step_by_step(model: PreTrainedModel, asked: Sequence[int], said: Sequence[int]) -> torch.Tensor:
    """The same with each token of the answer in a pass of its own: rounding alone tells it from one pass over all."""
    read = None
    for part in (asked, *([token] for token in said)):
        out = model(torch.tensor([part], device=model.device), past_key_values=read, use_cache=True)
        read = out.past_key_values
    logits: torch.Tensor = out.logits[0, -1]
    return logits
