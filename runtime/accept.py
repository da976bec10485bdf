"""Sample-and-match verification: the target chooses each token, and a draft token that equals it is accepted."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np
import torch

from hdtool.runtime.kernels.argmax import TreeLogits, Walk, argmax_of_row, bits_of, is_finite, readable
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.topk import known_argmax
from hdtool.runtime.sampling.drawn_walk import walk_draws
from hdtool.runtime.sampling.sampler import Mask, Sampler
from hdtool.runtime.sampling.truncation import NOT_FINITE
from hdtool.runtime.tree import OPEN, ROOT, DraftTree, descend

NOTHING_CERTAIN = np.empty(0, np.int64)


class Accepted(NamedTuple):
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
    walk = _walk_argmax(tree, logits, sampler, most) if sampler.walks else _walk_draws(tree, logits, sampler, most)
    if walk and not sampler.first_mask:
        return _accept_walk(walk, tree, sampler, stops)
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    if walk and sampler.first_mask:
        # Scores are processed only from the first token of the walk on that is not surely allowed.
        for token, drafted in _allowed(walk, sampler, sampler.first_mask):
            tokens.append(token)
            sampler.context.append(token)
            stopped = token in stops
            if stopped or len(tokens) == most or drafted == ROOT:
                return Accepted(path, tokens, stopped)
            path.append(drafted)
            node = drafted
    choose = sampler.chooser(logits, finite_only=len(tree) > 0)
    while True:
        only = OPEN if tree.certain is None else int(tree.certain[node + 1])
        token = only if only != OPEN and logits[node + 1, only].isfinite() else choose(node + 1)
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


def _accept_walk(walk: Walk, tree: DraftTree, sampler: Sampler, stops: Container[int]) -> Accepted | None:
    """The same where one compiled call has walked down the tree: stops are tested afterwards."""
    tokens, path, finite = walk
    if not finite and not len(tree):
        sampler.note_overflow()
    for place, token in enumerate(tokens):
        sampler.context.append(token)
        if token in stops:
            return Accepted(path[:place], tokens[: place + 1], stopped=True)
    sampler.overflowed |= not finite
    return Accepted(path[:-1], tokens) if tokens else None


def _allowed(walk: Walk, sampler: Sampler, mask: Mask) -> list[tuple[int, int]]:
    """The first tokens of a walk, as long as the mask allows them, and the children that have them."""
    if not walk.finite:
        return []
    count = mask.allowed(sampler.context, walk.tokens)
    return list(zip(walk.tokens[:count], walk.path[:count], strict=True))


def _walk_draws(tree: DraftTree, logits: torch.Tensor, sampler: Sampler, most: int) -> Walk | None:
    """The walk by the sampler's draws; None if the logits are no float32 numbers on a CPU, or are processed first.

    Under a mask, it ends before a token that depends on what the mask forbids.
    """
    draws = sampler.draws
    if draws is None or not logits.is_cpu or logits.dtype != torch.float32:
        return None
    rows, certain = readable(logits), NOTHING_CERTAIN if tree.certain is None else tree.certain
    address, apart, vocabulary, _ = bits_of(rows)
    longest, is_masked = min(most, len(tree.tokens) + 1), sampler.first_mask is not None
    of_tree = certain, tree.tokens, tree.parents, longest, sampler.walked
    found, finite = walk_draws(address, apart, vocabulary, *of_tree, len(sampler.context), is_masked, draws)
    return Walk.of(sampler.walked, found, finite)


def _walk_argmax(tree: DraftTree, logits: torch.Tensor, sampler: Sampler, most: int) -> Walk:
    if isinstance(logits, TreeLogits) and logits.walk:
        return logits.walk.first(most)
    walked, longest = sampler.walked, min(most, len(tree.tokens) + 1)
    if known := known_argmax(logits):
        found, finite = walk_known(*known, tree.tokens, tree.parents, longest, walked)
    else:
        rows = readable(logits)
        found, finite = walk(*bits_of(rows), NOTHING_CERTAIN, tree.tokens, tree.parents, longest, walked)
    return Walk.of(walked, found, finite)


def compile_acceptance() -> None:
    """Compile what greedy acceptance uses, or load it from the cache, before the first step."""
    bare, logits, walked = DraftTree.bare(0), torch.zeros(1, 1), np.zeros((2, 1), np.int64)
    walk(*bits_of(logits), NOTHING_CERTAIN, bare.tokens, bare.parents, 1, walked)
    walk_known(walked[0], walked[0], bare.tokens, bare.parents, 1, walked)


@compiled
def walk(
    address: int,
    apart: int,
    vocabulary: int,
    infinity: Array,
    certain: Array,
    drafted: Array,
    parents: Array,
    longest: int,
    walked: Array,
) -> tuple[int, bool]:
    """Write at most ``longest`` chosen tokens, and the node that drafted each, to ``walked``.

    Where a token is ``certain`` after a row, it is chosen, and its logit is the only one that is read.
    Returns their number and whether all logits that decided are finite. The walk ends
    before a row that is not finite, unless there is no other row.
    """
    node = ROOT
    for place in range(longest):
        token = certain[node + 1] if len(certain) > 0 else OPEN
        if token == OPEN:
            token, finite = argmax_of_row(address, apart, vocabulary, infinity, node + 1)
        else:
            finite = is_finite(address, apart, infinity, node + 1, token)
        if not finite and len(drafted) > 0:
            return place, False
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, finite
    return longest, True


@compiled
def walk_known(
    argmax: Array, are_finite: Array, drafted: Array, parents: Array, longest: int, walked: Array
) -> tuple[int, bool]:
    """The same where the arg-max of all rows is known."""
    node = ROOT
    for place in range(longest):
        token, finite = argmax[node + 1], are_finite[node + 1] != 0
        if not finite and len(drafted) > 0:
            return place, False
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, finite
    return longest, True
