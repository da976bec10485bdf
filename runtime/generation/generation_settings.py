"""Loads generation settings, and refuses those that hdtool does not support."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hdtool.data.errors import ModelError, error_reason

NO_SETTINGS = "none"
"""Value of --generation-config that selects the defaults of transformers."""

Refused = Callable[[Any], bool]


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _several(value: Any) -> bool:
    return value is not None and value > 1


REFUSED_SETTINGS: dict[str, tuple[Refused, str]] = {
    "num_beams": (_several, "hdtool decodes one sequence, not beams"),
    "num_beam_groups": (_several, "hdtool decodes one sequence, not beams"),
    "num_return_sequences": (_several, "hdtool returns one answer for each prompt"),
    "penalty_alpha": (_given, "contrastive search is not supported"),
    "dola_layers": (_given, "DoLa decoding is not supported"),
    "constraints": (_given, "constrained beam search is not supported"),
    "force_words_ids": (_given, "constrained beam search is not supported"),
    "token_healing": (_given, "hdtool does not change the tokens of the prompt"),
    "is_assistant": (_given, "the model ends its answers early, as a draft model of another"),
    "assistant_ensemble_weight": (_given, "it changes the distribution that tokens are drawn from"),
    "cache_implementation": (lambda value: value == "quantized", "a quantized KV cache changes the output"),
}
"""Maps each unsupported setting that changes the output of ``generate`` to ``(test for refused values, reason)``."""


def refused_setting(settings: GenerationConfig, allowed: Container[str] = ()) -> tuple[str, str] | None:
    """Return ``(name, reason)`` for the first unsupported setting not in ``allowed``, or None if there is none."""
    for name, (is_refused, reason) in REFUSED_SETTINGS.items():
        if name not in allowed and is_refused(getattr(settings, name, None)):
            return name, reason
    return None


def refuse_settings(settings: GenerationConfig) -> None:
    """Raise ModelError for generation settings that are not supported."""
    if refused := refused_setting(settings):
        name, reason = refused
        raise ModelError(
            f"{name} is {getattr(settings, name)!r} in the model's generation settings, but {reason}: remove it from "
            f"its generation_config.json, or name another file with --generation-config, or {NO_SETTINGS}"
        )


def generation_settings(chosen: str, model_settings: GenerationConfig) -> GenerationConfig:
    """Load generation settings from a file or the folder that holds it; ``NO_SETTINGS`` selects transformers' defaults.

    Special tokens that the loaded settings lack are copied from ``model_settings``. Raise ModelError if the file cannot
    be used.
    """
    if chosen == NO_SETTINGS:
        settings = GenerationConfig()
    else:
        path = Path(chosen).expanduser()
        file = path / "generation_config.json" if path.is_dir() else path
        try:
            row = json.loads(file.read_text(encoding="utf-8"))
            settings = GenerationConfig.from_dict(row)
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read ({error.strerror or error}): name a file of generation settings, or "
                f"{NO_SETTINGS}"
            ) from None
        except Exception as error:  # transformers raises many types of errors for invalid settings
            raise ModelError(
                f"{file} holds no generation settings ({error_reason(error)}): name a generation_config.json"
            ) from None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, copy.copy(getattr(model_settings, name)))
    return settings
