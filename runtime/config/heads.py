"""Architecture and training of drafting heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hdtool.runtime.config.checks import require

MOST_HEADS = 8
"""Most drafting heads, each of which predicts one token further ahead."""


@dataclass(frozen=True)
class HeadsConfig:
    """Architecture of drafting heads: Amphista (arXiv:2406.13170), its ablations, or Medusa (arXiv:2401.10774)."""

    heads: int = 4
    """Number of heads; head i predicts the token i + 1 positions ahead."""
    rank: int = 64
    """Rank of the bottleneck before each head's logits; 0 means none."""
    auto_embedding: int = 1
    """Layers of the block in which the heads attend to each other: 0 for none, 2 for Amphista-alpha."""
    positions: bool = True
    """Whether each head gets a learned position before that block."""
    adaptation: int = 2
    """Causal layers between the target and the heads: 0, 1 or 2."""
    sampled_token: bool = True
    """Whether these layers also read the sampled token."""
    mlp: int | None = None
    """Width inside these layers; None means the target's own."""

    def __post_init__(self) -> None:
        require(1 <= self.heads <= MOST_HEADS, "num-heads", self.heads, f"between 1 and {MOST_HEADS}")
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
    """Passes over the texts."""
    batch: int = 32
    """Texts per optimizer step."""
    micro_batch_size: int | None = None
    """Texts per forward pass; gradients of a step accumulate. None means the whole batch."""
    window: int = 2048
    """Most tokens of a text; longer texts are split."""
    learning_rate: float = 1e-3
    """Peak learning rate: linear rise during ``warm_up``, then cosine decay to 0."""
    warm_up: float = 0.05
    """Share of the steps in which the learning rate rises."""
    lm_weight: float = 0.1
    """Weight of the text's own tokens in the loss; distillation from the target has weight 1."""
    val_fraction: float = 0.05
    """Share of the texts held out to evaluate the heads and to choose their tree."""
    save_every: int = 50
    """Steps between checkpoints."""
    seed: int = 0
    max_bad_fraction: float = 0.05
    """Share of records that may be unusable before training is refused."""

    def __post_init__(self) -> None:
        require(self.epochs > 0, "epochs", self.epochs, "above 0")
        require(self.batch >= 1, "batch-size", self.batch, "1 or more")
        require(
            self.micro_batch_size is None or self.micro_batch_size >= 1,
            "micro-batch-size",
            self.micro_batch_size,
            "1 or more",
        )
        require(self.window >= 8, "window", self.window, "8 or more")
        require(0 < self.learning_rate < float("inf"), "learning-rate", self.learning_rate, "above 0")
        require(0 <= self.warm_up < 1, "warm-up", self.warm_up, "at least 0 and below 1")
        require(0 <= self.lm_weight < float("inf"), "lm-weight", self.lm_weight, "0 or more")
        require(0 < self.val_fraction < 1, "val-fraction", self.val_fraction, "above 0 and below 1")
        require(self.save_every >= 1, "save-every", self.save_every, "1 or more")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        require(0 <= self.max_bad_fraction <= 1, "max-bad-fraction", self.max_bad_fraction, "between 0 and 1")
