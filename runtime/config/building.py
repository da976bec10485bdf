"""How stores are built."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require

ENGINES = ("local", "ray")
"""Backends that run the tasks of a build."""


@dataclass(frozen=True)
class BuildConfig:
    """How stores are built."""

    max_bad_fraction: float = 0.05
    """Share of records that may be unusable before a build stops."""
    shard_bytes: int = 1 << 29
    """Bytes of tokens per shard of the corpus index. Sorting takes about seven times as much memory for each shard
    that is sorted at a time. Lookups take longer the more shards there are."""
    workers: int | None = None
    """Shards sorted in parallel, and workers that Ray starts on this machine; None means one per core."""
    top_k: int = 100_000
    """Sequences of each length that the model store keeps."""
    per_key: int = 12
    """Continuations that it keeps for each prefix."""
    engine: str = "local"
    """Build backend."""
    address: str | None = None
    """Address of a Ray cluster; None starts workers on this machine."""

    def __post_init__(self) -> None:
        require(self.engine in ENGINES, "engine", self.engine, f"one of {', '.join(ENGINES)}")
        require(self.address is None or self.engine == "ray", "address", self.address, "left out without --engine ray")
        require(0 <= self.max_bad_fraction <= 1, "max-bad-fraction", self.max_bad_fraction, "between 0 and 1")
        require(16 <= self.shard_bytes <= 1 << 30, "shard-bytes", self.shard_bytes, "between 16 and 2**30")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")
        require(self.top_k >= 1, "top-k", self.top_k, "1 or more")
        require(self.per_key >= 1, "per-key", self.per_key, "1 or more")
