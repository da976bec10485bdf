"""hdtool's settings inside SGLang, from an environment variable, as its options have no place for those of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hdtool.data.errors import OptionError
from hdtool.runtime.config import DecodeConfig, StoresConfig

VARIABLE = "HDTOOL_SGLANG"
DRAFTING = ("sources", "history", "history_prompts")
STORES = tuple(one.name for one in fields(StoresConfig))
ON_THE_HOST = "context,history,model,corpus"
"""The sources that need neither logits nor hidden states, which stay on the device."""


@dataclass(frozen=True)
class Settings:
    """What is drafted from."""

    decoding: DecodeConfig
    stores: StoresConfig = field(default_factory=StoresConfig)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """Read them from the environment; raise OptionError if they are invalid."""
        text = environment.get(VARIABLE) or "{}"
        known = ", ".join((*STORES, *DRAFTING))
        try:
            values: Any = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not set(values) <= {*STORES, *DRAFTING}:
            raise OptionError(f"{VARIABLE} is {text}: it must be a JSON object with any of {known}")
        drafting = {name: values[name] for name in DRAFTING if name in values}
        decoding = DecodeConfig(**{"sources": ON_THE_HOST, **drafting})
        return cls(decoding, StoresConfig(**{name: str(values[name]) for name in STORES if values.get(name)}))
