"""Settings for building stores, setting up from logs, and training drafting heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hdtool.data.record_counts import TOLERANCE
from hdtool.runtime.settings.settings_base import Panel, Settings, Use, rare_setting, require, setting

ENGINES = ("local", "ray")
"""Backends for running build tasks."""
MAX_BAD_FRACTION = "Share of records that may be unusable, and of bytes in files that cannot be read; both are named."


@dataclass(frozen=True)
class BuildConfig(Settings, panel=Panel.BUILD):
    """How stores are built. Each additional shard of a corpus index makes its lookups slower."""

    max_bad_fraction: float = rare_setting(TOLERANCE, MAX_BAD_FRACTION, min_value=0, max_value=1, panel=Panel.INPUT)
    shard_bytes: int = rare_setting(
        1 << 29, "Bytes of tokens per shard; sorting a shard takes seven times as much memory."
    )
    workers: int | None = setting(
        None, "Shards sorted in parallel, and local workers of Ray. Default: one per core.", min_value=1
    )
    top_k: int = setting(100_000, "Sequences kept of each length, the most frequent ones.", min_value=1)
    per_key: int = setting(12, "Continuations kept for each prefix.", min_value=1)
    engine: str = rare_setting("local", f"Build backend: {', '.join(ENGINES)}. The store is the same.", choices=ENGINES)
    address: str | None = rare_setting(
        None,
        "HOST:PORT of a Ray cluster. Default: Ray starts workers on this machine.",
        use=Use(no_effect=lambda given: given["engine"] != "ray" and "without --engine ray"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.address is None or self.engine == "ray", "address", self.address, "left out without --engine ray")
        require(16 <= self.shard_bytes <= 1 << 30, "shard-bytes", self.shard_bytes, "between 16 and 2**30")


MAX_HELD_OUT = 200
"""Maximum number of held-out conversations: more take longer to replay, and results hardly change."""


@dataclass(frozen=True)
class SetupConfig(Settings, panel=Panel.MEASUREMENT):
    """Which conversations ``setup`` holds out of the stores, and how it measures drafting on them."""

    held_out: float = rare_setting(
        0.1,
        f"Share of the conversations held out of the stores, {MAX_HELD_OUT} at most; they are what is measured.",
        option="held_out_fraction",
    )
    limit: int | None = setting(
        None,
        "Held-out prompts to answer. Default: as many as take about 40 seconds without drafts, 3 to 24.",
        option="num_prompts",
        min_value=1,
    )
    max_new_tokens: int = setting(128, "Maximum tokens in each answer.", min_value=1)
    max_bad_fraction: float = rare_setting(TOLERANCE, MAX_BAD_FRACTION, min_value=0, max_value=1, panel=Panel.INPUT)
    rankings: bool = rare_setting(
        False,
        "Add to the model store what the model ranks highest after each token of its vocabulary: a pass for each 256 "
        "tokens.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.held_out < 1, "held-out-fraction", self.held_out, "above 0 and below 1")


MAX_HEADS = 8
"""Maximum number of drafting heads; each predicts one token further ahead."""


AMPHISTA, MEDUSA, HYDRA, HYDRA_PLUS, MTP_LAYER = KINDS = "amphista", "medusa", "hydra", "hydra++", "mtp"
"""Kinds of drafting heads. Amphista and Medusa draft all positions in parallel, the other kinds token by token."""
PARTS: Mapping[str, Mapping[str, Any]] = {
    MEDUSA: {"auto_embedding": 0, "positions": False, "adaptation": 0, "sampled_token": False},
    HYDRA: {"auto_embedding": 0, "positions": False, "adaptation": 0, "sampled_token": False, "head_layers": 1},
    HYDRA_PLUS: {"auto_embedding": 0, "positions": False, "adaptation": 1, "sampled_token": False, "head_layers": 4},
    MTP_LAYER: {"auto_embedding": 0, "positions": False, "adaptation": 1, "sampled_token": True, "rank": 0},
}
"""Settings that each kind fixes, except that an option can set the layers of Hydra heads; Amphista heads fix none."""


def _kinds(*kinds: str) -> Use:
    """Return the ``Use`` of a setting that only these kinds of heads leave open; for others, it has no effect."""

    def no_effect(given: Mapping[str, Any]) -> object:
        if given["medusa"] and MEDUSA not in kinds:
            return "with --medusa, whose heads have none of these parts"
        return given["kind"] not in kinds and f"with --kind {given['kind']}, which does not choose this part"

    return Use(no_effect=no_effect)


@dataclass(frozen=True)
class HeadsConfig(Settings, panel=Panel.HEADS):
    """Architecture of drafting heads.

    Supports Amphista (arXiv:2406.13170) and its ablations, Medusa (arXiv:2401.10774), Hydra and Hydra++
    (arXiv:2402.05109), and a multi-token-prediction layer (arXiv:2412.19437).
    """

    kind: str = setting(
        AMPHISTA,
        f"{', '.join(KINDS)}. Heads that draft in parallel (amphista, medusa), after drafted tokens (hydra, "
        "hydra++), or a multi-token-prediction layer (mtp).",
        choices=KINDS,
    )
    heads: int = setting(
        4,
        "Number of heads. Each predicts one token further ahead. For mtp: steps that training runs the layer ahead.",
        option="num_heads",
        min_value=1,
        max_value=MAX_HEADS,
    )
    rank: int = rare_setting(
        64,
        "Rank of each head's output layer; 0: full.",
        option="lm_head_rank",
        use=_kinds(AMPHISTA, MEDUSA, HYDRA, HYDRA_PLUS),
    )
    auto_embedding: int = rare_setting(
        1,
        "Layers in which the heads attend to each other: 0, 1, or 2 for Amphista-alpha.",
        min_value=0,
        max_value=2,
        use=_kinds(AMPHISTA),
    )
    positions: bool = rare_setting(True, "Learn a position for each head.", use=_kinds(AMPHISTA))
    adaptation: int = rare_setting(
        2, "Causal layers between the model and the heads: 0, 1 or 2.", min_value=0, max_value=2, use=_kinds(AMPHISTA)
    )
    sampled_token: bool = rare_setting(True, "Feed the sampled token to these layers.", use=_kinds(AMPHISTA))
    mlp: int | None = rare_setting(
        None,
        "MLP width of these layers. Default: that of the model.",
        min_value=1,
        use=_kinds(AMPHISTA, HYDRA_PLUS, MTP_LAYER),
    )
    head_layers: int | None = rare_setting(
        None, "Layers of each head of hydra (default: 1) and hydra++ (4).", min_value=1, use=_kinds(HYDRA, HYDRA_PLUS)
    )
    draft_vocabulary: int | None = rare_setting(
        None, "Number of tokens that heads can draft: the most frequent ones of the texts. Default: all.", min_value=16
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 0, "lm-head-rank", self.rank, "1 or more, or 0 for full output layers")

    @property
    def resolved(self) -> HeadsConfig:
        """A copy of these settings that includes the values implied by ``kind``."""
        parts = PARTS.get(self.kind, {})
        return replace(self, **{**parts, **({"head_layers": self.head_layers} if self.head_layers else {})})

    @property
    def plain(self) -> HeadsConfig:
        """These settings with the kind ``medusa``, whose heads read only the target's hidden state."""
        return replace(self, kind=MEDUSA).resolved

    @classmethod
    def of_checkpoint(cls, settings: Mapping[str, Any]) -> HeadsConfig:
        """Return a checkpoint's settings; the kind is inferred if an earlier version did not store it."""
        config = cls(**settings)
        is_medusa = "kind" not in settings and not config.adaptation and not config.auto_embedding
        return config.plain if is_medusa else config


@dataclass(frozen=True)
class TrainConfig(Settings, panel=Panel.TRAINING):
    """How drafting heads are trained. The learning rate rises linearly, then decays to 0 along a cosine."""

    epochs: float = setting(4.0, "Passes over the texts.")
    batch: int = setting(32, "Texts per optimizer step.", option="batch_size", min_value=1)
    micro_batch_size: int | None = rare_setting(
        None, "Texts per forward pass; gradients accumulate. Default: the batch size.", min_value=1
    )
    window: int = rare_setting(2048, "Maximum number of tokens in a text; longer texts are split.", min_value=8)
    learning_rate: float = setting(1e-3, "Peak learning rate.")
    warm_up: float = rare_setting(0.05, "Share of the steps in which the learning rate rises.")
    lm_weight: float = rare_setting(0.1, "Weight of the text's tokens in the loss; distillation has weight 1.")
    val_fraction: float = rare_setting(
        0.05, "Share of the texts held out for evaluation and for the choice of the tree."
    )
    save_every: int = rare_setting(50, "Steps between checkpoints.", min_value=1)
    seed: int = setting(0, "Seed of initial weights and of the order of texts.", min_value=0)
    max_bad_fraction: float = rare_setting(TOLERANCE, MAX_BAD_FRACTION, min_value=0, max_value=1, panel=Panel.INPUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epochs > 0, "epochs", self.epochs, "above 0")
        require(0 < self.learning_rate < float("inf"), "learning-rate", self.learning_rate, "above 0")
        require(0 <= self.warm_up < 1, "warm-up", self.warm_up, "at least 0 and below 1")
        require(0 <= self.lm_weight < float("inf"), "lm-weight", self.lm_weight, "0 or more")
        require(0 < self.val_fraction < 1, "val-fraction", self.val_fraction, "above 0 and below 1")
