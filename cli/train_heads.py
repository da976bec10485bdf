"""``hdtool train-heads``: drafting heads for a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import HEADS, INPUT, OUTPUT, option
from hdtool.cli.parameters.settings import only
from hdtool.runtime.config import HeadsConfig, ModelConfig, TrainConfig


def train_heads(
    *,
    inputs: Annotated[
        list[str],
        option(INPUT, "Files, folders or globs of the model's answers, as build-model-db takes them.", "--from"),
    ],
    out: Annotated[Path, option(OUTPUT, "Folder of the heads; the same command resumes an interrupted training.")],
    hidden_states: Annotated[
        Path | None,
        option(OUTPUT, "File for the model's hidden states: computed once, read by each epoch and each training."),
    ] = None,
    chat: options.Chat = None,
    loading: Annotated[ModelConfig, only("model", "gguf_file", "device", "dtype", "trust_remote_code").as_argument()],
    medusa: Annotated[bool, option(HEADS, "The same as --kind medusa.", "--medusa")] = False,
    heads: HeadsConfig,
    config: TrainConfig,
    quiet: options.Quiet = False,
) -> None:
    """Train drafting heads (Amphista, Medusa, Hydra, MTP).

    The model itself does not change. Its own answers to prompts like yours, as hdtool collect writes them, are the best
    training data. Several GPUs: accelerate launch -m hdtool.cli train-heads ...
    """
    from hdtool.builders.heads.train import train
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries(quiet=quiet)
    chosen = heads.plain if medusa else heads.resolved
    for line in train(inputs, out, loading, chosen, config, chat=chat, hidden_states=hidden_states, quiet=quiet):
        print(line, file=sys.stderr)
