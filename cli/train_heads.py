"""``hdtool train-heads``: drafting heads for a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import HEADS, INPUT, OUTPUT, TRAINING, option
from hdtool.runtime.config import HeadsConfig, ModelConfig, TrainConfig


def train_heads(
    inputs: Annotated[
        list[str],
        option(INPUT, "Files, folders or globs of the model's answers, as build-model-db takes them.", "--from"),
    ],
    out: Annotated[Path, option(OUTPUT, "Folder of the heads; the same command resumes an interrupted training.")],
    max_bad_fraction: options.MaxBadFraction = TrainConfig.max_bad_fraction,
    chat: options.Chat = None,
    model: options.Model = ModelConfig.model,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    medusa: Annotated[bool, option(HEADS, "Medusa heads: independent of each other.", "--medusa")] = False,
    num_heads: Annotated[
        int, option(HEADS, "Number of heads; each predicts one token further ahead.")
    ] = HeadsConfig.heads,
    lm_head_rank: Annotated[int, option(HEADS, "Rank of each head's output layer; 0: full.")] = HeadsConfig.rank,
    auto_embedding: Annotated[
        int, option(HEADS, "Layers in which the heads attend to each other: 0, 1, or 2 for Amphista-alpha.")
    ] = HeadsConfig.auto_embedding,
    positions: Annotated[
        bool, option(HEADS, "Learn a position for each head.", "--positions/--no-positions")
    ] = HeadsConfig.positions,
    adaptation: Annotated[
        int, option(HEADS, "Causal layers between the model and the heads: 0, 1 or 2.")
    ] = HeadsConfig.adaptation,
    sampled_token: Annotated[
        bool, option(HEADS, "Feed the sampled token to these layers.", "--sampled-token/--no-sampled-token")
    ] = HeadsConfig.sampled_token,
    mlp: Annotated[
        int | None, option(HEADS, "MLP width of these layers. Default: that of the model.")
    ] = HeadsConfig.mlp,
    epochs: Annotated[float, option(TRAINING, "Passes over the texts.")] = TrainConfig.epochs,
    batch: Annotated[int, option(TRAINING, "Texts per optimizer step.", "--batch-size")] = TrainConfig.batch,
    micro_batch_size: Annotated[
        int | None, option(TRAINING, "Texts per forward pass; gradients accumulate. Default: the batch size.")
    ] = TrainConfig.micro_batch_size,
    window: Annotated[int, option(TRAINING, "Most tokens of a text; longer texts are split.")] = TrainConfig.window,
    learning_rate: Annotated[float, option(TRAINING, "Peak learning rate.")] = TrainConfig.learning_rate,
    warm_up: Annotated[
        float, option(TRAINING, "Share of the steps in which the learning rate rises.")
    ] = TrainConfig.warm_up,
    lm_weight: Annotated[
        float, option(TRAINING, "Weight of the text's tokens in the loss; distillation has weight 1.")
    ] = TrainConfig.lm_weight,
    val_fraction: Annotated[
        float, option(TRAINING, "Share of the texts held out for evaluation and for the choice of the tree.")
    ] = TrainConfig.val_fraction,
    save_every: Annotated[int, option(TRAINING, "Steps between checkpoints.")] = TrainConfig.save_every,
    seed: Annotated[int, option(TRAINING, "Seed of initial weights and of the order of texts.")] = TrainConfig.seed,
    quiet: options.Quiet = False,
) -> None:
    """Train drafting heads (Amphista or Medusa).

    The model itself does not change. Its own answers to prompts like yours, as hdtool collect writes them, are the best
    training data. Several GPUs: accelerate launch -m hdtool.cli train-heads ...
    """
    heads = HeadsConfig(
        heads=num_heads,
        rank=lm_head_rank,
        auto_embedding=auto_embedding,
        positions=positions,
        adaptation=adaptation,
        sampled_token=sampled_token,
        mlp=mlp,
    )
    heads = heads.plain if medusa else heads
    config = TrainConfig(
        epochs=epochs,
        batch=batch,
        micro_batch_size=micro_batch_size,
        window=window,
        learning_rate=learning_rate,
        warm_up=warm_up,
        lm_weight=lm_weight,
        val_fraction=val_fraction,
        save_every=save_every,
        seed=seed,
        max_bad_fraction=max_bad_fraction,
    )

    from hdtool.builders.heads.train import train
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries()
    loading = ModelConfig(model=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    for line in train(inputs, out, loading, heads, config, chat=chat, quiet=quiet):
        print(line, file=sys.stderr)
