"""The types of models that the installed library generates text with."""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

CLASSES: dict[str, Any] = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": AutoModelForCausalLM,
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": AutoModelForImageTextToText,
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": AutoModelForMultimodalLM,
}
"""The auto classes, in the order in which hdtool asks them."""
WHOLE_FIRST = tuple(CLASSES)[1:] + tuple(CLASSES)[:1]


def every_type() -> list[str]:
    """The names of all types, sorted."""
    return sorted({kind for mapping in CLASSES for kind in getattr(modeling_auto, mapping, {})})


def auto_class(kind: str) -> Any:
    """The auto class of a type's checkpoints: that of the whole model where there is one of its text part, too."""
    return CLASSES[next(mapping for mapping in WHOLE_FIRST if kind in getattr(modeling_auto, mapping, {}))]


def configuration_class(kind: str) -> type[PreTrainedConfig]:
    found: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    return found
