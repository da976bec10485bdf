"""Finds the device of a model's input, checks that all weights are on one device, and disables cuDNN's attention."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_planless_attention(device: torch.device) -> None:
    """Disable cuDNN's attention on CUDA devices.

    cuDNN builds an execution plan for each new prompt length and tree size, which takes tens of milliseconds.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that the model's input must be on: the one set by accelerate's hook, or else the model's."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    execution = getattr(hook, "execution_device", None)
    return model.device if execution is None else torch.device(execution)


def not_on_one_device_reason(model: PreTrainedModel) -> str:
    """Return why a model's weights are not all on one device, or an empty string if they are."""
    refs = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if torch.device("meta") in refs:
        return "some of its weights are loaded only when they are needed"
    if len(refs) > 1:
        return f"its weights lie on {', '.join(sorted(map(str, refs)))}"
    return ""
