"""hdtool's settings inside vLLM, passed to each worker in vLLM's additional configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdtool.data.errors import OptionError
from hdtool.data.stores.home import namespace_among
from hdtool.runtime.config import StoresConfig, VllmConfig

KEY = "hdtool"
STORES = ("model_db", "corpus_db")
DRAFTING = ("min_draft_prob", "context_mib", "history")


@dataclass(frozen=True)
class Settings:
    """The stores and the drafting options."""

    serving: VllmConfig
    stores: StoresConfig = field(default_factory=StoresConfig)

    @classmethod
    def of(cls, additional: Any, draft_tokens: int) -> Settings:
        """Read them from vLLM's additional configuration; raise OptionError if they are invalid."""
        values = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(values, Mapping) or not set(values) <= {*STORES, *DRAFTING}:
            raise OptionError(
                f"{KEY} in vLLM's additional configuration is {values!r}: it takes {', '.join((*STORES, *DRAFTING))}"
            )
        try:
            serving = VllmConfig(draft_tokens, **{name: values[name] for name in DRAFTING if name in values})
        except TypeError:
            raise OptionError(
                f"{KEY} in vLLM's additional configuration is {values!r}: its values must be numbers"
            ) from None
        return cls(serving, StoresConfig(**{name: str(values[name]) for name in STORES if values.get(name)}))

    def additional(self) -> dict[str, Any]:
        """The additional configuration for vLLM's command line, without defaults."""
        values = {name: getattr(self.stores, name) for name in STORES}
        values |= {name: getattr(self.serving, name) for name in DRAFTING}
        defaults = VllmConfig()
        return {KEY: {name: value for name, value in values.items() if value != getattr(defaults, name, None)}}

    def store_set(self, served_as: Sequence[str]) -> StoresConfig:
        """The stores to open; a tenant's if the model is served under the name of a namespace."""
        return StoresConfig(self.stores.model_db, self.stores.corpus_db, namespace_among(served_as))
