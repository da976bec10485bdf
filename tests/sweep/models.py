"""Create a tiny random model of any type."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Embedding, Linear
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from tests.support.oracle import generated, prompt_of
from tests.sweep.shrink import small_settings, without_windows
from tests.sweep.special import SPECIAL, merged
from tests.sweep.types import auto_class, configuration_class

MAX_PARAMETERS = 30_000_000
"""Maximum number of parameters of a tiny model."""
MIN_DISTINCT_TOKENS, TRIES = 6, 3
"""Minimum number of different tokens in an answer, and how often weights may be scaled up to reach it."""


class NotBuiltError(Exception):
    """Raised when no tiny model of a type can be created."""


def small_config(kind: str, *, windows: bool = True) -> PreTrainedConfig:
    made = configuration_class(kind)
    settings = merged(small_settings(made()), SPECIAL.get(kind, {}))
    return made(**(settings if windows else without_windows(settings)))


def tiny_model(kind: str, *, windows: bool = True) -> PreTrainedModel:
    """Create a random model of a type, with equal weights in every run and without tokens that end an answer."""
    model: Any = initial_model(kind, windows=windows).float().eval()
    if not getattr(model, "generation_config", None):
        raise NotBuiltError("its class does not generate text")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    _embed_padding(model)
    _enliven(model)
    found: PreTrainedModel = model
    return found


def initial_model(kind: str, *, windows: bool = True) -> PreTrainedModel:
    """Create a model of a type with the weights that its class begins with."""
    config, made = small_config(kind, windows=windows), auto_class(kind)
    try:
        _check_size(made, config)
    except ImportError as error:
        part = getattr(config, "vision_config", None)
        if "timm" not in str(error) or part is None:
            raise
        AutoModel.register(type(part), _stand_in(type(part)), exist_ok=True)
        _check_size(made, config)
    torch.manual_seed(sum(map(ord, kind)))
    model: PreTrainedModel = made.from_config(config)
    return model


@torch.inference_mode()
def _embed_padding(model: PreTrainedModel) -> None:
    """Give padding tokens a nonzero embedding.

    Answers here contain them, and with zeros, an indexer would give all keys equal scores.
    """
    for module in model.modules():
        if isinstance(module, Embedding) and module.padding_idx is not None and len(module.weight) > 1:
            row = module.padding_idx
            module.weight[row] = module.weight[row - 1 if row else 1].flip(0)


@torch.inference_mode()
def _enliven(model: PreTrainedModel) -> None:
    """Scale up the weights of a model that keeps repeating the same tokens."""
    prompt = prompt_of(45)
    for _ in range(TRIES):
        try:
            if len(set(generated(model, prompt, 16))) >= MIN_DISTINCT_TOKENS:
                return
        except Exception:  # the type's check reports the error
            return
        for module in model.modules():
            if isinstance(module, Linear | Embedding) and not module.weight.is_meta:
                module.weight.mul_(2)


def _check_size(made: Any, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        number = sum(part.numel() for part in made.from_config(config).parameters())
    if number > MAX_PARAMETERS:
        raise NotBuiltError(f"no rule makes it small: {number:,} parameters")


def _stand_in(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return a replacement for an image model whose library is not installed. Text does not pass through it."""

    class NoPart(PreTrainedModel):
        config_class = config

        def __init__(self, config: PreTrainedConfig, *_: Any, **__: Any) -> None:
            super().__init__(config)
            self.post_init()  # type: ignore[no-untyped-call]

    return NoPart
