"""How stores are built."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require

ENGINES = ("local", "ray")
"""Who carries out the tasks of a build."""


@dataclass(frozen=True)
class BuildConfig:
    """How stores are built."""

    tolerate: float = 0.05
    """The share of records that may be unusable before a build gives up."""
    shard_bytes: int = 1 << 29
    """Of tokens in a shard of the corpus index. Sorting takes about seven times as much memory, for each
    shard that is sorted at once; a look-up takes the longer the more shards there are."""
    workers: int | None = None
    """Shards sorted at once, and workers that Ray starts on this machine; none means one for each core."""
    top_k: int = 100_000
    """Sequences that the model store keeps of each length."""
    per_key: int = 12
    """Continuations that it keeps for each prefix."""
    engine: str = "local"
    """Who carries out the tasks."""
    address: str | None = None
    """Of a Ray cluster; none means that Ray starts workers on this machine."""

    def __post_init__(self) -> None:
        require(self.engine in ENGINES, "engine", self.engine, f"one of {', '.join(ENGINES)}")
        require(self.address is None or self.engine == "ray", "address", self.address, "left out without --engine ray")
        require(0 <= self.tolerate <= 1, "tolerate", self.tolerate, "from 0 to 1")
        require(16 <= self.shard_bytes <= 1 << 30, "shard bytes", self.shard_bytes, "from 16 to 2**30")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "1 or more")
        require(self.top_k >= 1, "top-k", self.top_k, "1 or more")
        require(self.per_key >= 1, "per-key", self.per_key, "1 or more")
