"""``hdtool train-heads``: drafting heads for a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.runtime.config import HeadsConfig, ModelConfig, TrainConfig


def train_heads(
    inputs: Annotated[
        list[str],
        typer.Option("--from", help="Files, folders or globs of what the model said, as build-model-db takes them."),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the heads; the same command goes on after a kill.")],
    model: options.Model = ModelConfig.model,
    medusa: Annotated[
        bool, typer.Option("--medusa", help="Plain heads, each on its own: no adaptation, positions or auto-embedding.")
    ] = False,
    heads: Annotated[int, typer.Option(help="Tokens ahead that are drafted, a head for each.")] = HeadsConfig.heads,
    lm_head_rank: Annotated[int, typer.Option(help="Of each head's output layer; 0: full.")] = HeadsConfig.rank,
    auto_embedding: Annotated[
        int, typer.Option(help="Layers in which the heads look at each other: 0, 1, or 2 for Amphista-alpha.")
    ] = HeadsConfig.auto_embedding,
    positions: Annotated[
        bool, typer.Option("--positions/--no-positions", help="Whether the heads learn which of them they are.")
    ] = HeadsConfig.positions,
    adaptation: Annotated[
        int, typer.Option(help="Causal layers between the model and the heads: 0, 1 or 2.")
    ] = HeadsConfig.adaptation,
    sampled_token: Annotated[
        bool,
        typer.Option("--sampled-token/--no-sampled-token", help="Whether these layers read the last token, too."),
    ] = HeadsConfig.sampled_token,
    mlp: Annotated[int | None, typer.Option(help="Width inside these layers. Default: the model's.")] = HeadsConfig.mlp,
    epochs: Annotated[float, typer.Option(help="How often each text is read.")] = TrainConfig.epochs,
    batch: Annotated[int, typer.Option(help="Texts a step.")] = TrainConfig.batch,
    at_once: Annotated[
        int | None, typer.Option(help="Texts in one pass; gradients of a step add up. Default: all of a step's.")
    ] = TrainConfig.at_once,
    window: Annotated[int, typer.Option(help="Tokens of a text at most; longer ones are cut.")] = TrainConfig.window,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = TrainConfig.rate,
    warm_up: Annotated[float, typer.Option(help="Share of the steps in which it rises.")] = TrainConfig.warm_up,
    lm_weight: Annotated[
        float, typer.Option(help="Of the tokens themselves in the loss; the model's own odds weigh 1.")
    ] = TrainConfig.lm_weight,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts that heads are judged on and their tree is chosen by.")
    ] = TrainConfig.held_out,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = TrainConfig.save_every,
    seed: Annotated[
        int, typer.Option(help="Of the order of the texts and of all that begins at random.")
    ] = TrainConfig.seed,
    tolerate: options.Tolerate = TrainConfig.tolerate,
    device: options.Device = ModelConfig.device,
    dtype: options.DType = ModelConfig.dtype,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    chat: options.Chat = None,
    quiet: options.Quiet = False,
) -> None:
    """Train drafting heads (Amphista) on what a model said.

    The model itself stays as it is. What it said to prompts like yours, as hdtool collect gathers it, is the best
    to learn from. Several GPUs train together under accelerate launch -m hdtool.cli train-heads ...
    """
    shape = HeadsConfig(heads, lm_head_rank, auto_embedding, positions, adaptation, sampled_token, mlp)
    shape = shape.plain if medusa else shape
    config = TrainConfig(epochs, batch, at_once, window, rate, warm_up, lm_weight, held_out, save_every, seed, tolerate)

    from hdtool.builders.heads.train import train
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries()
    asked = ModelConfig(model, device, dtype, trust_remote_code)
    for line in train(inputs, out, asked, shape, config, chat=chat, quiet=quiet):
        print(line, file=sys.stderr)
