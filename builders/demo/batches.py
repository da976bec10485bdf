"""What a training reads: the tokens of its documents in rounds, and the windows of each step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from hdtool.builders.demo.corpus import Document
from hdtool.builders.demo.recipe import Recipe
from hdtool.builders.demo.tokenizer import as_text

Tokens = npt.NDArray[np.uint16]

PASSES = {"math": 3.0, "explain": 2.0, "prose": 1.0, "write": 1.0, "edit": 0.7, "code": 0.6}
"""Passes over the documents of each kind in one round."""


def encode(tokenizer: PreTrainedTokenizerBase, group: Iterable[Document]) -> dict[str, list[Tokens]]:
    """The tokens of each document, by kind."""
    encoded: dict[str, list[Tokens]] = {kind: [] for kind in PASSES}
    for document in group:
        ids = tokenizer(as_text(document), add_special_tokens=False, verbose=False)["input_ids"]
        encoded[document.kind].append(np.asarray(ids, np.uint16))
    return encoded


def stream(encoded: dict[str, list[Tokens]], recipe: Recipe) -> Tokens:
    """The rounds one after another."""
    return np.concatenate([one_round(encoded, recipe.seed + number) for number in range(recipe.rounds)])


def one_round(encoded: dict[str, list[Tokens]], seed: int) -> Tokens:
    """Documents of all kinds, shuffled and concatenated."""
    order = np.random.default_rng(seed)
    pieces = [
        document
        for kind, group in encoded.items()
        for share in shares(PASSES[kind])
        for document in group
        if order.random() < share
    ]
    order.shuffle(pieces)
    return np.concatenate(pieces)


def shares(passes: float) -> list[float]:
    """2.5 passes are two whole ones and one half."""
    return [1.0] * int(passes) + ([passes % 1] if passes % 1 else [])


def batch_at(step: int, progress: float, tokens: Tokens, recipe: Recipe) -> torch.Tensor:
    """Windows of ``window + 1`` tokens; near the end of the training, windows as long as the context instead.

    Drawn from (seed, step) alone, so that a resumed run reads the same batches.
    """
    is_long = progress >= 1 - recipe.long_share
    length = recipe.context if is_long else recipe.window
    rows = recipe.batch * recipe.window // length
    starts = np.random.default_rng((recipe.seed, step)).integers(0, len(tokens) - length, rows)
    return torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
