"""Sample-and-match verification: the target chooses each token, and a draft token that equals it is accepted."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from hdtool.runtime.sampler import NOT_FINITE, Sampler
from hdtool.runtime.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Accepted:
    """The outcome of one step: the accepted nodes, and their tokens followed by the bonus token."""

    path: list[int]
    tokens: list[int]
    stopped: bool = False
    """Whether the last token ends the answer."""


def accept(
    tree: DraftTree, logits: torch.Tensor, sampler: Sampler, *, stops: Container[int] = (), most: int
) -> Accepted | None:
    """Walk down the tree while it contains the token that the target chooses.

    At each node the target chooses the next token from its own distribution; the choice is emitted
    whether or not it was drafted. The walk ends at a stop token and after ``most`` tokens. Membership in ``stops``
    is tested exactly once for each token, when the token is the last one of ``sampler.context``.

    A rejected draft token that overflowed can make the logits of other nodes NaN or infinite, so acceptance ends
    before such a node. If the node is the root, nothing is accepted and the result is None: the step must be
    computed again without drafts.
    """
    choose = sampler.chooser(logits, finite_only=len(tree) > 0)
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
