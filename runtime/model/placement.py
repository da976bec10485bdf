"""Placement of a model's weights: one device, several devices, or offloaded."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import ModelError
from hdtool.data.extras import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_planless_attention(device: torch.device) -> None:
    """Have torch choose attention kernels that run at any shape at once.

    cuDNN's attention makes a plan for each length of a prompt and each size of a tree, which takes tens of
    milliseconds each time.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device of the model's input; for offloaded weights it is the execution device of their hook."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    execution = getattr(hook, "execution_device", None)
    return model.device if execution is None else torch.device(execution)


def scattered(model: PreTrainedModel) -> str:
    """Why the weights are not all on one device; empty if they are."""
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if torch.device("meta") in places:
        return "some of its weights are loaded only when they are needed"
    if len(places) > 1:
        return f"its weights lie on {', '.join(sorted(map(str, places)))}"
    return ""


def require_accelerate(feature: str) -> None:
    """Raise if accelerate, which transformers needs to place weights, is not installed."""
    if not find_spec("accelerate"):
        raise ModelError(f"{feature} needs accelerate, which is not installed: {install_command('gpus')}")
