"""What drafting heads are made of, and how they are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hdtool.runtime.config.checks import require

MOST_HEADS = 8
"""Drafting heads at most: tokens that they speak of ahead."""


@dataclass(frozen=True)
class HeadsConfig:
    """What drafting heads are made of; the switches give Amphista, its ablations and Medusa."""

    heads: int = 4
    """Each speaks of one more token ahead."""
    rank: int = 64
    """Of the bottleneck before each head's logits; 0 means none."""
    auto_embedding: int = 1
    """Layers of the block in which the heads look at each other: 0 for none, 2 for Amphista-alpha."""
    positions: bool = True
    """Whether the heads learn who of them is which before they look at each other."""
    adaptation: int = 2
    """Causal layers between the target and the heads: 0, 1 or 2."""
    sampled_token: bool = True
    """Whether these layers read the token that was chosen, too."""
    mlp: int | None = None
    """Width inside these layers; None means the target's own."""

    def __post_init__(self) -> None:
        require(1 <= self.heads <= MOST_HEADS, "heads", self.heads, f"from 1 to {MOST_HEADS}")
        require(self.rank >= 0, "lm-head-rank", self.rank, "1 or more, or 0 for full output layers")
        require(0 <= self.auto_embedding <= 2, "auto-embedding", self.auto_embedding, "0, 1 or 2")
        require(0 <= self.adaptation <= 2, "adaptation", self.adaptation, "0, 1 or 2")
        require(self.mlp is None or self.mlp >= 1, "mlp", self.mlp, "1 or more")

    @property
    def plain(self) -> HeadsConfig:
        """Medusa: each head on its own, on the target's hidden state alone."""
        return replace(self, auto_embedding=0, positions=False, adaptation=0, sampled_token=False)

    @property
    def is_plain(self) -> bool:
        return self == self.plain


@dataclass(frozen=True)
class TrainConfig:
    """How drafting heads are trained."""

    epochs: float = 4.0
    """How often each text is read."""
    batch: int = 32
    """Texts a step."""
    at_once: int | None = None
    """Texts in one pass; the gradients of a step add up. None means all of a step's."""
    window: int = 2048
    """Tokens that a text may have; longer ones are cut into several."""
    rate: float = 1e-3
    """The highest learning rate; it goes up during ``warm_up`` and then down to nothing along a cosine."""
    warm_up: float = 0.05
    """Share of the steps."""
    lm_weight: float = 0.1
    """Of the tokens themselves in the loss; the target's own odds weigh 1."""
    held_out: float = 0.05
    """Share of the texts that the heads are judged on, and their tree is chosen by."""
    save_every: int = 50
    """Steps between checkpoints: what a kill costs at most."""
    seed: int = 0
    tolerate: float = 0.05
    """The share of records that may be unusable before the training does not begin."""

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", self.epochs, "above 0")
        require(self.batch >= 1, "batch", self.batch, "1 or more")
        require(self.at_once is None or self.at_once >= 1, "at-once", self.at_once, "1 or more")
        require(self.window >= 8, "window", self.window, "8 or more")
        require(0 < self.rate < float("inf"), "rate", self.rate, "above 0")
        require(0 <= self.warm_up < 1, "warm-up", self.warm_up, "from 0 to below 1")
        require(0 <= self.lm_weight < float("inf"), "lm-weight", self.lm_weight, "0 or more")
        require(0 < self.held_out < 1, "held-out", self.held_out, "between 0 and 1")
        require(self.save_every >= 1, "save-every", self.save_every, "1 or more")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        require(0 <= self.tolerate <= 1, "tolerate", self.tolerate, "from 0 to 1")
