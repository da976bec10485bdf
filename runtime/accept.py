"""Acceptance by sample-and-match: the target chooses, drafts only save it the walk."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from hdtool.runtime.sampler import Sampler
from hdtool.runtime.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Accepted:
    """What one step brought: the nodes followed, and the tokens, one more than nodes."""

    path: list[int]
    tokens: list[int]


def accept(
    tree: DraftTree, logits: torch.Tensor, sampler: Sampler, *, stops: Collection[int] = (), most: int
) -> Accepted:
    """Follow the tree as long as it holds what the target chooses.

    At each node the target chooses the next token from its own distribution; the choice is emitted
    whether or not it was drafted. Ends at a stop token and after ``most`` tokens.
    """
    choose = sampler.over(logits)
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    while True:
        token = choose(node + 1)
        tokens.append(token)
        sampler.context.append(token)
        child = tree.child(node, token) if len(tree) else None
        if child is None or token in stops or len(tokens) == most:
            return Accepted(path, tokens)
        path.append(child)
        node = child
