"""Where a model's weights lie: on one device, on several, or partly elsewhere until they are needed."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model reads its input. Weights that are loaded when needed lie nowhere; their hook knows."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    told = getattr(hook, "execution_device", None)
    return model.device if told is None else torch.device(told)


def scattered(model: PreTrainedModel) -> str:
    """How the weights lie if not all on one device, else nothing."""
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if torch.device("meta") in places:
        return "some of its weights are loaded only when they are needed"
    if len(places) > 1:
        return f"its weights lie on {', '.join(sorted(map(str, places)))}"
    return ""


def require_accelerate(whose: str) -> None:
    """The library that transformers places weights with, which only those need who have several places."""
    if not find_spec("accelerate"):
        raise ModelError(f'{whose} needs accelerate, which is not installed: pip install "hdtool[gpus]"')
