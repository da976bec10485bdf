"""Logits of plain passes by a model's own code, optionally in higher precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.kernels.compact_weight import expand_compact, is_compact
from hdtool.runtime.model.compact_layers import compact_parameters, replace_parameter
from hdtool.runtime.model.transformers_internals import last_logits_only, passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIGHER_PRECISION = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
"""Maps each dtype to the next one of much higher precision; float64 has none."""


@contextmanager
def more_precise(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """In this block, hold all weights on ``device`` in the next higher precision; restore the originals afterwards.

    Raise a ``ModelError`` if no higher precision exists.
    """
    if model.dtype not in HIGHER_PRECISION:
        raise ModelError(f"there is no higher precision than {model.dtype}")
    higher = HIGHER_PRECISION[model.dtype]
    compact = compact_parameters(model)
    parameters = (tensor for tensor in model.parameters() if not is_compact(tensor))
    tensors = [tensor for tensor in chain(parameters, model.buffers()) if tensor.is_floating_point()]
    kept = [tensor.data for tensor in tensors]
    try:
        for weight, refs in compact:
            replace_parameter(refs, expand_compact(weight).to(device, higher))
        for tensor in tensors:
            wider = tensor.dtype in HIGHER_PRECISION and torch.finfo(tensor.dtype).bits < torch.finfo(higher).bits
            tensor.data = tensor.data.to(device, higher if wider else tensor.dtype)
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data
        for weight, refs in compact:
            replace_parameter(refs, weight)


@torch.inference_mode()
def logits_after(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits after ``ids``, from one plain pass without a cache."""
    ids_of_pass = torch.tensor([ids], device=model.device)
    logits: torch.Tensor = model(ids_of_pass, use_cache=False, **last_logits_only(model)).logits[0, -1]
    return logits


@torch.inference_mode()
def logits_step_by_step(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return the logits after the last token of an answer, which is read token by token after the prompt.

    The logits differ from the logits of a single pass only by rounding.
    """
    parts = [torch.tensor([part], device=model.device) for part in (prompt, *([token] for token in answer))]
    *_, last = passes(model, parts)
    logits: torch.Tensor = last.logits[0, -1]
    return logits
