"""The drafters of a server: each tenant drafts from its own stores and its own history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hdtool.data.stores.home import namespace_among
from hdtool.runtime.budget.measure_passes import cost_here
from hdtool.runtime.budget.node_budget import Budget, Together
from hdtool.runtime.config import DecodeConfig, StoresConfig
from hdtool.runtime.config.methods import OPTION_METHODS
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import budget_for, drafter_within, history_for
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.stores.store_set import StoreSet


class Tenants:
    """The drafters of all tenants; one drafter serves one answer at a time."""

    def __init__(self, loaded: Loaded, decoding: DecodeConfig, stores: StoresConfig, names: list[str]) -> None:
        self._loaded, self._decoding = loaded, decoding
        self.rows: Callable[[], int] = lambda: 1
        """Answers that are being generated; the server sets it."""
        self.store_sets = {name: self._stores_of(stores, name) for name in names}
        self._free: dict[str, list[Drafter]] = {name: [] for name in names}
        self._measure()
        for name in names:  # faults of stores are found here, and not by the first answer
            self.put(name, self._made(name))

    def take(self, tenant: str) -> Drafter:
        free = self._free[tenant]
        return free.pop() if free else self._made(tenant)

    def put(self, tenant: str, drafter: Drafter) -> None:
        """Give a drafter back at the end of its answer."""
        self._free[tenant].append(drafter)

    def _stores_of(self, stores: StoresConfig, tenant: str) -> StoreSet:
        loaded, decoding = self._loaded, self._decoding
        namespace = stores.namespace or namespace_among([tenant] if tenant else [])
        opened = StoreSet.for_tokenizer(
            loaded.tokenizer,
            replace(stores, namespace=namespace),
            decoding.databases,
            model=loaded.checkpoint,
            identified=decoding.keeps_history,
        )
        return replace(opened, history=history_for(decoding, loaded.target, opened, tenant=tenant))

    def _made(self, tenant: str) -> Drafter:
        return drafter_within(self._budget, self._decoding, self.store_sets[tenant], self._loaded.target)

    def _measure(self) -> None:
        """Time the passes for 1, 2, 4 … answers at once, if the method has a choice of sizes."""
        target, decoding, size = self._loaded.target, self._decoding, self._decoding.batch_size
        if decoding.draft_tokens is not None or decoding.method not in OPTION_METHODS["draft_tokens"]:
            return
        numbers = {min(size, 2**power) for power in range(size.bit_length() + 1)}
        curves = {rows: cost_here(target, rows) for rows in sorted(numbers)}
        self._together = Together(target.log, curves, only_timed_sizes=target.captures)

    def _budget(self) -> Budget:
        return budget_for(self._decoding, lambda: self._together, lambda: max(1, self.rows()))
