"""Architecture and training of drafting heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hdtool.data.tally import TOLERANCE
from hdtool.runtime.config.building import MAX_BAD_FRACTION
from hdtool.runtime.config.setting import Settings, require, setting

MOST_HEADS = 8
"""Most drafting heads, each of which predicts one token further ahead."""


@dataclass(frozen=True)
class HeadsConfig(Settings):
    """Architecture of drafting heads: Amphista (arXiv:2406.13170), its ablations, or Medusa (arXiv:2401.10774)."""

    heads: int = setting(
        4, "Number of heads; each predicts one token further ahead.", option="num_heads", least=1, most=MOST_HEADS
    )
    rank: int = setting(64, "Rank of each head's output layer; 0: full.", option="lm_head_rank")
    auto_embedding: int = setting(
        1, "Layers in which the heads attend to each other: 0, 1, or 2 for Amphista-alpha.", least=0, most=2
    )
    positions: bool = setting(True, "Learn a position for each head.")
    adaptation: int = setting(2, "Causal layers between the model and the heads: 0, 1 or 2.", least=0, most=2)
    sampled_token: bool = setting(True, "Feed the sampled token to these layers.")
    mlp: int | None = setting(None, "MLP width of these layers. Default: that of the model.", least=1)
    draft_vocabulary: int | None = setting(
        None, "Number of tokens that heads can draft: the most frequent ones of the texts. Default: all.", least=16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 0, "lm-head-rank", self.rank, "1 or more, or 0 for full output layers")

    @property
    def plain(self) -> HeadsConfig:
        """Medusa: each head on its own, on the target's hidden state alone."""
        return replace(self, auto_embedding=0, positions=False, adaptation=0, sampled_token=False)


@dataclass(frozen=True)
class TrainConfig(Settings):
    """How drafting heads are trained: linear rise of the learning rate, then cosine decay to 0."""

    epochs: float = setting(4.0, "Passes over the texts.")
    batch: int = setting(32, "Texts per optimizer step.", option="batch_size", least=1)
    micro_batch_size: int | None = setting(
        None, "Texts per forward pass; gradients accumulate. Default: the batch size.", least=1
    )
    window: int = setting(2048, "Maximum number of tokens in a text; longer texts are split.", least=8)
    learning_rate: float = setting(1e-3, "Peak learning rate.")
    warm_up: float = setting(0.05, "Share of the steps in which the learning rate rises.")
    lm_weight: float = setting(0.1, "Weight of the text's tokens in the loss; distillation has weight 1.")
    val_fraction: float = setting(0.05, "Share of the texts held out for evaluation and for the choice of the tree.")
    save_every: int = setting(50, "Steps between checkpoints.", least=1)
    seed: int = setting(0, "Seed of initial weights and of the order of texts.", least=0)
    max_bad_fraction: float = setting(TOLERANCE, MAX_BAD_FRACTION, least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epochs > 0, "epochs", self.epochs, "above 0")
        require(0 < self.learning_rate < float("inf"), "learning-rate", self.learning_rate, "above 0")
        require(0 <= self.warm_up < 1, "warm-up", self.warm_up, "at least 0 and below 1")
        require(0 <= self.lm_weight < float("inf"), "lm-weight", self.lm_weight, "0 or more")
        require(0 < self.val_fraction < 1, "val-fraction", self.val_fraction, "above 0 and below 1")
