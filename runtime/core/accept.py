"""Sample-and-match verification: the target chooses each token, and a draft token that equals it is accepted."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch

from hdtool.runtime.core.engine_interface import Verified, Walk
from hdtool.runtime.core.race_leaders import walk_races
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.top_k_top_p import NOT_FINITE
from hdtool.runtime.core.tree import ROOT, UNDETERMINED, DraftTree, rows_of
from hdtool.runtime.core.tree_walks import NO_FORCED_TOKENS, walk_argmax, walk_draws, walk_known, walk_ranked
from hdtool.runtime.kernels.topk import bits_of, readable


class Accepted(NamedTuple):
    """The accepted nodes of one step, and the emitted tokens: the tokens of these nodes, then the bonus token."""

    path: list[int]
    tokens: list[int]
    stopped: bool = False
    """True if the last token ends the answer."""

    @property
    def rows(self) -> list[int]:
        """Rows of the pass from whose logits the emitted tokens were chosen."""
        return rows_of(self.path)


def accept(
    tree: DraftTree, verified: Verified, sampler: Sampler, *, stops: Container[int] = (), max_tokens: int
) -> Accepted | None:
    """Accept draft tokens as long as they equal the tokens that the target chooses.

    At each node, the sampler chooses the next token from the target's logits. That token is emitted whether it was
    drafted or not, and the walk continues at the child that drafted it. The walk ends if there is no such child, at a
    token that ends the answer, or after ``max_tokens`` tokens. The sampler takes each token exactly once, in order.

    Overflowing activations of a rejected draft token can make the logits of other nodes NaN or infinite, so the walk
    ends before a node with such logits. If the root's logits are not finite, return None if the tree has drafts: the
    caller must recompute the step without them. Without drafts, raise ModelError if tokens are sampled or, on a CPU,
    chosen under a mask. Raise PromptError if a mask allows no token.
    """
    walk = _compiled_walk(tree, verified, sampler, max_tokens)
    if walk and not sampler.shortcuts.only_mask and _has_ended(walk, max_tokens):
        return _accept_walk(walk, tree, sampler, stops)
    path: list[int] = []
    tokens: list[int] = []
    node = ROOT
    if walk:
        # Logits are processed only from the first token on that a mask may forbid or that the rankings don't determine.
        for token, drafted in _allowed(walk, sampler):
            tokens.append(token)
            stopped = sampler.take(token, stops)
            if stopped or len(tokens) == max_tokens or drafted == ROOT:
                return Accepted(path, tokens, stopped)
            path.append(drafted)
            node = drafted
    choose = sampler.chooser(verified.logits, finite_only=len(tree) > 0, finite=verified.finite, first=verified.root)
    while True:
        only = UNDETERMINED if tree.forced_tokens is None else int(tree.forced_tokens[node + 1])
        token = only if only != UNDETERMINED and verified.logits[node + 1, only].isfinite() else choose(node + 1)
        if token == NOT_FINITE:
            return Accepted(path[:-1], tokens) if path else None
        tokens.append(token)
        stopped = sampler.take(token, stops)
        child = tree.child(node, token) if len(tree) and not stopped and len(tokens) < max_tokens else None
        if child is None:
            return Accepted(path, tokens, stopped)
        path.append(child)
        node = child


def _accept_walk(walk: Walk, tree: DraftTree, sampler: Sampler, stops: Container[int]) -> Accepted | None:
    """Accept a walk's tokens up to the first that ends the answer, and note overflows; None if there are none."""
    tokens, children, finite = walk
    if not finite and not len(tree):
        sampler.note_overflow()
    for index, token in enumerate(tokens):
        if sampler.take(token, stops):
            return Accepted(children[:index], tokens[: index + 1], stopped=True)
    sampler.overflowed |= not finite
    return Accepted(children[:-1], tokens) if tokens else None


def _has_ended(walk: Walk, max_tokens: int) -> bool:
    """Return True if a walk ended because it left the tree, reached ``max_tokens`` or met non-finite logits."""
    return ROOT in walk.children or len(walk.tokens) == max_tokens or not walk.finite


def _allowed(walk: Walk, sampler: Sampler) -> list[tuple[int, int]]:
    """Return a walk's leading ``(token, child)`` pairs whose tokens the mask is known to allow.

    Return all pairs if the sampler has no mask, and none if ``walk.finite`` is False.
    """
    if not walk.finite:
        return []
    mask = sampler.shortcuts.only_mask
    count = mask.allowed(sampler.context, walk.tokens) if mask else len(walk.tokens)
    return list(zip(walk.tokens[:count], walk.children[:count], strict=True))


def _compiled_walk(tree: DraftTree, verified: Verified, sampler: Sampler, max_tokens: int) -> Walk | None:
    """Return a walk down the tree by argmax or draws, from the pass or by compiled code; None if neither is possible.

    A walk by draws under a mask ends before the first token that depends on what the mask forbids. A walk by rankings
    or races ends before the first token that depends on logits outside the ranking or of tokens that don't lead.
    """
    shortcuts = sampler.shortcuts
    if shortcuts.chooses_by_argmax and verified.walk:
        return verified.walk.first(max_tokens)
    max_walk_tokens, walk_buffer = min(max_tokens, len(tree.tokens) + 1), sampler.walk_buffer
    nodes = tree.tokens, tree.parents, max_walk_tokens, walk_buffer
    forced_tokens = NO_FORCED_TOKENS if tree.forced_tokens is None else tree.forced_tokens
    if shortcuts.chooses_by_argmax:
        if known := verified.known_argmax():
            tokens, finite = known
            return Walk.of(walk_buffer, *walk_known(tokens, finite, *nodes))
        rows = readable(verified.logits)
        return Walk.of(walk_buffer, *walk_argmax(*bits_of(rows), forced_tokens, *nodes))
    draws, logits = shortcuts.draws, verified.logits
    if draws and verified.ranked and shortcuts.max_ranked and tree.forced_tokens is None:
        (best, scores), position = verified.ranked, len(sampler.context)
        return Walk.of(walk_buffer, *walk_ranked(logits.shape[1], best, scores, *nodes, position, draws))
    if shortcuts.races and verified.races is not None and tree.forced_tokens is None:
        return Walk.of(walk_buffer, *walk_races(verified.races, *nodes, len(sampler.context), shortcuts.races))
    if draws is None or not logits.is_cpu or logits.dtype != torch.float32:
        return None
    rows, is_masked = readable(logits), shortcuts.only_mask is not None
    address, stride, vocabulary, _ = bits_of(rows)
    tree_arguments = forced_tokens, *nodes
    return Walk.of(
        walk_buffer, *walk_draws(address, stride, vocabulary, *tree_arguments, len(sampler.context), is_masked, draws)
    )
