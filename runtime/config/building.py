"""How stores are built."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.data.tally import TOLERANCE
from hdtool.runtime.config.setting import Settings, require, setting

ENGINES = ("local", "ray")
"""Backends that run the tasks of a build."""
MAX_BAD_FRACTION = "Share of records that may be unusable; they are counted and named."


@dataclass(frozen=True)
class BuildConfig(Settings):
    """How stores are built. Lookups in a corpus index take longer the more shards there are."""

    max_bad_fraction: float = setting(TOLERANCE, MAX_BAD_FRACTION, least=0, most=1)
    shard_bytes: int = setting(1 << 29, "Bytes of tokens per shard; sorting a shard takes seven times as much memory.")
    workers: int | None = setting(
        None, "Shards sorted in parallel, and local workers of Ray. Default: one per core.", least=1
    )
    top_k: int = setting(100_000, "Number of sequences kept of each length, the most frequent ones.", least=1)
    per_key: int = setting(12, "Continuations kept for each prefix.", least=1)
    engine: str = setting("local", f"Build backend: {', '.join(ENGINES)}. The store is the same.", choices=ENGINES)
    address: str | None = setting(None, "HOST:PORT of a Ray cluster. Default: Ray starts workers on this machine.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.address is None or self.engine == "ray", "address", self.address, "left out without --engine ray")
        require(16 <= self.shard_bytes <= 1 << 30, "shard-bytes", self.shard_bytes, "between 16 and 2**30")
