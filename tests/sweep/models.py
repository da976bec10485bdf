"""A tiny random model of any type."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Embedding, Linear
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from tests.support.oracle import generated, prompt_of
from tests.sweep.shrink import small_settings, without_windows
from tests.sweep.special import SPECIAL, merged
from tests.sweep.types import auto_class, configuration_class

LARGEST = 30_000_000
"""Parameters of a model that is taken to be tiny."""
LIVELY, TRIES = 6, 3
"""Different tokens of an answer, and how often weights are enlarged for them."""


class NotBuiltError(Exception):
    """No tiny model of a type could be made."""


def small_config(kind: str, *, windows: bool = True) -> PreTrainedConfig:
    made = configuration_class(kind)
    settings = merged(small_settings(made()), SPECIAL.get(kind, {}))
    return made(**(settings if windows else without_windows(settings)))


def tiny_model(kind: str, *, windows: bool = True) -> PreTrainedModel:
    """A random model of a type, equal in every run; nothing in it ends an answer."""
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
    model: Any = made.from_config(config).float().eval()
    if not getattr(model, "generation_config", None):
        raise NotBuiltError("its class does not generate text")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    _embed_padding(model)
    _enliven(model)
    found: PreTrainedModel = model
    return found


@torch.inference_mode()
def _embed_padding(model: PreTrainedModel) -> None:
    """Give padding tokens, which answers here contain, a vector: for zeros, all keys of an indexer score alike."""
    for module in model.modules():
        if isinstance(module, Embedding) and module.padding_idx is not None and len(module.weight) > 1:
            row = module.padding_idx
            module.weight[row] = module.weight[row - 1 if row else 1].flip(0)


@torch.inference_mode()
def _enliven(model: PreTrainedModel) -> None:
    """Enlarge weights of a model that says the same again and again."""
    prompt = prompt_of(45)
    for _ in range(TRIES):
        try:
            if len(set(generated(model, prompt, 16))) >= LIVELY:
                return
        except Exception:  # the check of the type reports it
            return
        for module in model.modules():
            if isinstance(module, Linear | Embedding) and not module.weight.is_meta:
                module.weight.mul_(2)


def _check_size(made: Any, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        number = sum(part.numel() for part in made.from_config(config).parameters())
    if number > LARGEST:
        raise NotBuiltError(f"no rule makes it small: {number:,} parameters")


def _stand_in(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """In the place of a part for images whose library is not installed; text does not pass through it."""

    class NoPart(PreTrainedModel):
        config_class = config

        def __init__(self, config: PreTrainedConfig, *_: Any, **__: Any) -> None:
            super().__init__(config)
            self.post_init()  # type: ignore[no-untyped-call]

    return NoPart
