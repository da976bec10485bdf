"""Sample-and-match verification: the target chooses each token, and a draft token that equals it is accepted."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch

from hdtool.runtime.engine import Verified, Walk
from hdtool.runtime.kernels.topk import bits_of, readable
from hdtool.runtime.sampling.draws import NOT_FINITE
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sampling.walks import NOTHING_CERTAIN, walk_argmax, walk_draws, walk_known, walk_ranked
from hdtool.runtime.tree import ROOT, UNDETERMINED, DraftTree


class Accepted(NamedTuple):
    """The outcome of one step: the accepted nodes, and their tokens followed by the bonus token."""

    path: list[int]
    tokens: list[int]
    stopped: bool = False
    """True if the last token ends the answer."""


def accept(
    tree: DraftTree, verified: Verified, sampler: Sampler, *, stops: Container[int] = (), max_tokens: int
) -> Accepted | None:
    """Walk down the tree while it contains the token that the target chooses.

    At each node the target chooses the next token from its own distribution and emits it, drafted or not. The walk
    ends at a stop token and after ``max_tokens`` tokens. Membership in ``stops`` is tested exactly once for each token,
    when the token is the last one of ``sampler.context``.

    A rejected draft token that overflowed can make the logits of other nodes NaN or infinite, so acceptance ends
    before such a node. If it is the root, nothing is accepted and the result is None: recompute the step without
    drafts.
    """
    walk = _compiled_walk(tree, verified, sampler, max_tokens)
    if walk and not sampler.first_mask and _has_ended(walk, max_tokens):
        return _accept_walk(walk, tree, sampler, stops)
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    if walk:
        # Scores are processed only from the first token on that is not surely allowed, or not known by rankings.
        for token, drafted in _allowed(walk, sampler):
            tokens.append(token)
            sampler.context.append(token)
            stopped = token in stops
            if stopped or len(tokens) == max_tokens or drafted == ROOT:
                return Accepted(path, tokens, stopped)
            path.append(drafted)
            node = drafted
    choose = sampler.chooser(verified.logits, finite_only=len(tree) > 0, finite=verified.finite, first=verified.root)
    while True:
        only = UNDETERMINED if tree.certain is None else int(tree.certain[node + 1])
        token = only if only != UNDETERMINED and verified.logits[node + 1, only].isfinite() else choose(node + 1)
        if token == NOT_FINITE:
            return Accepted(path[:-1], tokens) if path else None
        tokens.append(token)
        sampler.context.append(token)
        stopped = token in stops
        child = tree.child(node, token) if len(tree) and not stopped and len(tokens) < max_tokens else None
        if child is None:
            return Accepted(path, tokens, stopped)
        path.append(child)
        node = child


def _accept_walk(walk: Walk, tree: DraftTree, sampler: Sampler, stops: Container[int]) -> Accepted | None:
    """Accept a whole walk; stops are tested afterwards."""
    tokens, path, finite = walk
    if not finite and not len(tree):
        sampler.note_overflow()
    for place, token in enumerate(tokens):
        sampler.context.append(token)
        if token in stops:
            return Accepted(path[:place], tokens[: place + 1], stopped=True)
    sampler.overflowed |= not finite
    return Accepted(path[:-1], tokens) if tokens else None


def _has_ended(walk: Walk, max_tokens: int) -> bool:
    """Return True if a walk reached an undrafted token, ``max_tokens`` tokens or a row that is not finite."""
    return not walk.finite or len(walk.tokens) == max_tokens or walk.path[-1:] == [ROOT]


def _allowed(walk: Walk, sampler: Sampler) -> list[tuple[int, int]]:
    """The first tokens of a walk, as long as a mask allows them, and the children that have them."""
    if not walk.finite:
        return []
    count = sampler.first_mask.allowed(sampler.context, walk.tokens) if sampler.first_mask else len(walk.tokens)
    return list(zip(walk.tokens[:count], walk.path[:count], strict=True))


def _compiled_walk(tree: DraftTree, verified: Verified, sampler: Sampler, max_tokens: int) -> Walk | None:
    """The walk by arg-max or by draws, in compiled code; None if logits are processed before the choice.

    Under a mask, a walk by draws ends before a token that depends on what the mask forbids, and by rankings, before one
    that depends on logits that are not among the highest.
    """
    if sampler.walks and verified.walk:
        return verified.walk.first(max_tokens)
    longest, walked = min(max_tokens, len(tree.tokens) + 1), sampler.walked
    nodes = tree.tokens, tree.parents, longest, walked
    certain = NOTHING_CERTAIN if tree.certain is None else tree.certain
    if sampler.walks:
        if known := verified.known_argmax():
            tokens, finite = known
            return Walk.of(walked, *walk_known(tokens, finite, *nodes))
        rows = readable(verified.logits)
        return Walk.of(walked, *walk_argmax(*bits_of(rows), certain, *nodes))
    draws, logits = sampler.draws, verified.logits
    if draws and verified.ranked and sampler.max_ranked and tree.certain is None:
        (best, scores), position = verified.ranked, len(sampler.context)
        return Walk.of(walked, *walk_ranked(logits.shape[1], best, scores, *nodes, position, draws))
    if draws is None or not logits.is_cpu or logits.dtype != torch.float32:
        return None
    rows, is_masked = readable(logits), sampler.first_mask is not None
    address, stride, vocabulary, _ = bits_of(rows)
    of_tree = certain, *nodes
    return Walk.of(walked, *walk_draws(address, stride, vocabulary, *of_tree, len(sampler.context), is_masked, draws))
