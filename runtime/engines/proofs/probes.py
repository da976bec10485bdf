"""Arbitrary contexts and draft trees for checks and measurements, and the logits that an engine computes for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import BackendEngine

PROOF_TREE = DraftTree.of(7, [11, 23, 5, 41, 2, 17, 29], [-1, 0, 1, -1, 3, 0, -1])
PROOF_CONTEXT = 5
"""Length of the context before ``PROOF_TREE``; short, because a large model may need a second for 40 tokens."""


def some_context(length: int, vocabulary: int) -> list[int]:
    """Return ``length`` arbitrary token ids for measurements and checks."""
    return [(7 * place + 3) % vocabulary for place in range(length)]


def small_tree(
    vocabulary: int, number: int = 5, depth: int = 3, length: int = 4
) -> tuple[list[int], DraftTree, list[list[int]]]:
    """Return ``(context, tree, paths)``; ``tree`` consists of ``number`` separate ``paths`` of ``depth`` nodes each.

    The context has ``length`` tokens, of which the last is the root. If a model ignores masks or positions, the logits
    of all paths but the first are wrong.
    """
    context = some_context(length, vocabulary)
    paths = [[(31 * path + 11 * place + 5) % vocabulary for place in range(depth)] for path in range(number)]
    tokens = [token for path in paths for token in path]
    parents = [node - 1 if node % depth else -1 for node in range(len(tokens))]
    return context, DraftTree.of(context[-1], tokens, parents), paths


def logits_of(
    engine: BackendEngine,
    context: Sequence[int],
    steps: Sequence[tuple[DraftTree, Sequence[int]]],
    cache: Cache | None = None,
) -> list[torch.Tensor]:
    """Read a context, then verify each step's tree and commit its path; return the logits of each pass over a tree."""
    cache = cache or engine.allocate()
    engine.prefill(cache, 0, context, room=sum(len(tree) + 1 for tree, _ in steps))
    logits = []
    for tree, path in steps:
        logits.append(engine.verify(cache, [tree])[0].logits.clone())
        engine.commit(cache, 0, path)
    return logits


def two_steps(engine: BackendEngine, vocabulary: int, cache: Cache | None = None) -> list[torch.Tensor]:
    """Return the logits of two passes over a tree, with a commit in between that moves cache positions."""
    context, tree, _ = small_tree(vocabulary)
    return logits_of(engine, context[:-1], [(tree, [3, 4, 5]), (tree, [])], cache)
