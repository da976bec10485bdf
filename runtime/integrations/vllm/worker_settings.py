"""The settings of hdtool's drafter in vLLM, which every worker reads from vLLM's additional configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hdtool.data.errors import OptionError
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.serving import VllmConfig

CUSTOM_CLASS_METHOD, PROPOSER = "custom_class", "hdtool.runtime.integrations.vllm.HierarchyProposer"
"""Speculative method and model by which vLLM's configuration names hdtool's drafter."""
CONFIG_KEY = "hdtool"
STORE_FIELDS = ("model_db", "corpus_db")
DRAFTING_FIELDS = ("min_draft_prob", "context_mib", "history")
TENANT = "tenant"


@dataclass(frozen=True)
class VllmSettings:
    """The stores to draft from and the drafting options, as passed to each worker of vLLM."""

    serving: VllmConfig
    stores: StoresConfig = field(default_factory=StoresConfig)
    tenant: str | None = None
    """Tenant whose answers are kept: None derives it from the model's names, and "" is the shared tenant."""

    @classmethod
    def of(cls, additional: Any, draft_tokens: int) -> VllmSettings:
        """Read the settings from vLLM's additional configuration; raise OptionError if they are invalid."""
        values = additional.get(CONFIG_KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(values, Mapping) or not set(values) <= {*STORE_FIELDS, *DRAFTING_FIELDS, TENANT}:
            known = ", ".join((*STORE_FIELDS, *DRAFTING_FIELDS, TENANT))
            raise OptionError(f"{CONFIG_KEY} in vLLM's additional configuration is {values!r}: it takes {known}")
        try:
            serving = VllmConfig(draft_tokens, **{name: values[name] for name in DRAFTING_FIELDS if name in values})
        except TypeError:
            raise OptionError(
                f"{CONFIG_KEY} in vLLM's additional configuration is {values!r}: "
                "its limits and probabilities must be numbers"
            ) from None
        stores = StoresConfig(**{name: str(values[name]) for name in STORE_FIELDS if values.get(name)})
        tenant = values.get(TENANT)
        return cls(serving, stores, None if tenant is None else str(tenant))

    def additional(self) -> dict[str, Any]:
        """Return the additional configuration for vLLM's command line, omitting settings with default values."""
        values = {name: getattr(self.stores, name) for name in STORE_FIELDS}
        values |= {name: getattr(self.serving, name) for name in DRAFTING_FIELDS}
        values |= {TENANT: self.tenant}
        defaults = VllmConfig()
        return {CONFIG_KEY: {name: value for name, value in values.items() if value != getattr(defaults, name, None)}}
