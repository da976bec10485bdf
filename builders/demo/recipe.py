"""Size, data order and optimiser of one training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The defaults make the embedded demo model."""

    kind: str = "llama"
    vocabulary: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 1024
    context: int = 1024
    window: int = 512
    long_share: float = 0.15
    batch: int = 16
    steps: int = 3400
    rounds: int = 1
    matrix_rate: float = 0.012
    vector_rate: float = 0.003
    matrix_decay: float = 0.01
    seed: int = 0


HYBRID = Recipe(kind="hybrid", layers=8, mlp=320, batch=64, steps=3000, rounds=4, matrix_decay=0.1)
"""A third of the embedded model's layers of attention, and four times the tokens of each of its steps."""

RECIPES = {recipe.kind: recipe for recipe in (Recipe(), HYBRID)}
