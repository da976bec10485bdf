"""Model types with which the installed transformers generates text."""

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
"""Auto classes in the order in which hdtool tries them."""
WHOLE_FIRST = tuple(CLASSES)[1:] + tuple(CLASSES)[:1]


def every_type() -> list[str]:
    """Return the sorted names of all types."""
    return sorted({kind for mapping in CLASSES for kind in getattr(modeling_auto, mapping, {})})


def auto_class(kind: str) -> Any:
    """Return the auto class of a type's checkpoints, preferring the whole model's class to its text part's."""
    return CLASSES[next(mapping for mapping in WHOLE_FIRST if kind in getattr(modeling_auto, mapping, {}))]


def configuration_class(kind: str) -> type[PreTrainedConfig]:
    found: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    return found
