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
TENANT = "tenant"


@dataclass(frozen=True)
class Settings:
    """The stores and the drafting options."""

    serving: VllmConfig
    stores: StoresConfig = field(default_factory=StoresConfig)
    tenant: str | None = None
    """Whose answers are kept; None is the one that the names of the model stand for, and an empty name is nobody."""

    @classmethod
    def of(cls, additional: Any, draft_tokens: int) -> Settings:
        """Read them from vLLM's additional configuration; raise OptionError if they are invalid."""
        values = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(values, Mapping) or not set(values) <= {*STORES, *DRAFTING, TENANT}:
            known = ", ".join((*STORES, *DRAFTING, TENANT))
            raise OptionError(f"{KEY} in vLLM's additional configuration is {values!r}: it takes {known}")
        try:
            serving = VllmConfig(draft_tokens, **{name: values[name] for name in DRAFTING if name in values})
        except TypeError:
            raise OptionError(
                f"{KEY} in vLLM's additional configuration is {values!r}: its limits and probabilities must be numbers"
            ) from None
        stores = StoresConfig(**{name: str(values[name]) for name in STORES if values.get(name)})
        tenant = values.get(TENANT)
        return cls(serving, stores, None if tenant is None else str(tenant))

    def additional(self) -> dict[str, Any]:
        """The additional configuration for vLLM's command line, without defaults."""
        values = {name: getattr(self.stores, name) for name in STORES}
        values |= {name: getattr(self.serving, name) for name in DRAFTING}
        values |= {TENANT: self.tenant}
        defaults = VllmConfig()
        return {KEY: {name: value for name, value in values.items() if value != getattr(defaults, name, None)}}

    def store_set(self, served_as: Sequence[str]) -> StoresConfig:
        """The stores to open; a tenant's if the model is served under the name of a namespace."""
        names = [self.tenant] if self.tenant else served_as
        return StoresConfig(self.stores.model_db, self.stores.corpus_db, namespace_among(names))


def tenant_among(served_as: Sequence[str], model: str) -> str:
    """Whose answers a server of these names keeps: those of its namespace, else of its first name; empty is nobody.

    A model that is served under its own name has no tenant unless there are stores of that name.
    """
    return namespace_among([*served_as, model]) or next((name for name in served_as if name != model), "")
