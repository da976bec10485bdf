"""A tiny random model of any type."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.sweep.shrink import small_settings
from tests.sweep.special import SPECIAL, merged
from tests.sweep.types import auto_class, configuration_class

LARGEST = 20_000_000
"""Parameters of a model that is taken to be tiny."""


class NotBuiltError(Exception):
    """No tiny model of a type could be made."""


def small_config(kind: str) -> PreTrainedConfig:
    made = configuration_class(kind)
    special = SPECIAL.get(kind, {})
    default = made(**special.get("default", {}))
    settings = small_settings(default)
    return made(**merged(settings, special.get("changes", {})))


def tiny_model(kind: str) -> PreTrainedModel:
    """The same random model of a type in every run; nothing in it ends an answer."""
    config = small_config(kind)
    with torch.device("meta"):
        number = sum(part.numel() for part in auto_class(kind).from_config(config).parameters())
    if number > LARGEST:
        raise NotBuiltError(f"no rule makes it small: {number:,} parameters")
    torch.manual_seed(sum(map(ord, kind)))
    model: Any = auto_class(kind).from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found: PreTrainedModel = model
    return found
