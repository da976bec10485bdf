"""Acceptance by sample-and-match: the target chooses, drafts only save it the walk."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from hdtool.runtime.sampler import NOT_FINITE, Sampler
from hdtool.runtime.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Accepted:
    """What one step brought: the nodes followed, and the tokens, one more than nodes."""

    path: list[int]
    tokens: list[int]
    stopped: bool = False
    """Whether the last token ends the answer."""


def accept(
    tree: DraftTree, logits: torch.Tensor, sampler: Sampler, *, stops: Container[int] = (), most: int
) -> Accepted | None:
    """Follow the tree as long as it holds what the target chooses.

    At each node the target chooses the next token from its own distribution; the choice is emitted
    whether or not it was drafted. Ends at a stop token and after ``most`` tokens. ``stops`` is asked
    exactly once for each token, when the token stands at the end of ``sampler.context``.

    Logits of a pass with drafts that are NaN or infinite are not trusted: a rejected draft that overflowed may have
    caused them. Acceptance ends before such a node. If it is the root, nothing is accepted and the result is None:
    the step must be computed again without drafts.
    """
    choose = sampler.over(logits, finite_only=len(tree) > 0)
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    while True:
        token = choose(node + 1)
        if token == NOT_FINITE:
            return Accepted(path[:-1], tokens) if path else None
        tokens.append(token)
        sampler.context.append(token)
        stopped = token in stops
        child = tree.child(node, token) if len(tree) and not stopped and len(tokens) < most else None
        if child is None:
            return Accepted(path, tokens, stopped)
        path.append(child)
        node = child
