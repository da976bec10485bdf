"""What hdtool is told inside vLLM: a part of vLLM's additional configuration, which reaches every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdtool.data.errors import OptionError
from hdtool.data.stores.home import namespace_among
from hdtool.runtime.config import ServeConfig, StoresConfig

KEY = "hdtool"
STORES = ("model_db", "corpus_db")
DRAFTING = ("min_draft_prob", "context_mib")


@dataclass(frozen=True)
class Settings:
    """Which stores are drafted from, and how."""

    serving: ServeConfig
    stores: StoresConfig = field(default_factory=StoresConfig)

    @classmethod
    def of(cls, additional: Any, draft_tokens: int) -> Settings:
        """Out of vLLM's additional configuration, as whoever started vLLM wrote it."""
        told = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(told, Mapping) or not set(told) <= {*STORES, *DRAFTING}:
            raise OptionError(
                f"{KEY} in vLLM's additional configuration is {told!r}: it takes {', '.join((*STORES, *DRAFTING))}"
            )
        try:
            serving = ServeConfig(draft_tokens, **{name: told[name] for name in DRAFTING if name in told})
        except TypeError:
            raise OptionError(f"{KEY} in vLLM's additional configuration is {told!r}: those are no numbers") from None
        return cls(serving, StoresConfig(**{name: str(told[name]) for name in STORES if told.get(name)}))

    def additional(self) -> dict[str, Any]:
        """The same for vLLM's command line; what is as it always is stays out."""
        told = {name: getattr(self.stores, name) for name in STORES}
        told |= {name: getattr(self.serving, name) for name in DRAFTING}
        usual = ServeConfig()
        return {KEY: {name: value for name, value in told.items() if value != getattr(usual, name, None)}}

    def store_set(self, served_as: Sequence[str]) -> StoresConfig:
        """The stores to open: with those of a tenant, if the model is served under a name that has some."""
        return StoresConfig(self.stores.model_db, self.stores.corpus_db, namespace_among(served_as))
