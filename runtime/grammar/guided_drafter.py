"""Drafts of structured output: what the grammar forces is added to a drafter's trees, what it forbids is removed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hdtool.runtime.drafter import Drafter, NoDraft, WrappedDrafter
from hdtool.runtime.grammar.guide import Guide
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, OPEN, ROOT, DraftTree


@runtime_checkable
class ExpectingDrafter(Protocol):
    """A drafter that continues from tokens that are almost certain."""

    def expect(self, tokens: Sequence[int]) -> None:
        """Begin the next tree with this chain."""
        ...

    def forget_tree(self) -> None:
        """The last tree was verified in another form: learn nothing from its nodes."""
        ...


def guided(drafter: Drafter, guide: Guide | None, draft_tokens: int | None = None) -> Drafter:
    """The drafter of an answer that must match a grammar, if there is one; plain decoding stays plain.

    ``draft_tokens`` bounds the nodes of a tree.
    """
    if guide is None or isinstance(drafter, NoDraft) or draft_tokens == 0:
        return drafter
    return GuidedDrafter(drafter, guide, LARGEST_TREE if draft_tokens is None else draft_tokens)


class GuidedDrafter(WrappedDrafter):
    """A drafter for one answer that must match a grammar."""

    def __init__(self, drafter: Drafter, guide: Guide, most: int = LARGEST_TREE) -> None:
        """``most`` bounds the nodes of a tree."""
        super().__init__(drafter)
        self._guide, self._most = guide, min(most, LARGEST_TREE)
        self._asked = 0
        self._spent = 0.0

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        return {**super().seconds, SourceName.GRAMMAR: self._spent}

    def begin(self, prompt: Sequence[int]) -> None:
        self._asked = len(prompt)
        super().begin(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        self._guide.follow(context[self._asked :])
        expecting = self._drafter if isinstance(self._drafter, ExpectingDrafter) else None
        if expecting:
            expecting.expect(self._guide.forced()[: self._most])
        self._spent += time.perf_counter() - started
        drafted = self._drafter.draft(context)
        started = time.perf_counter()
        tree = self._guided(drafted)
        if expecting and tree is not drafted:
            expecting.forget_tree()
        self._spent += time.perf_counter() - started
        return tree

    def _guided(self, tree: DraftTree) -> DraftTree:
        """The nodes that the grammar allows, and below them the chains that it forces, the most probable ones first."""
        found = self._guide.guided(tree.tokens, tree.parents)
        if found.allowed.all() and not found.chains:
            return DraftTree(tree.root, tree.tokens, tree.parents, tree.sources, _certain(len(tree), found.certain))
        chains, certain = found.chains, dict(found.certain)
        if not found.allowed.all():
            order = np.flatnonzero(found.allowed)
            tree = tree.picked(order)
            places = {int(node): place for place, node in enumerate(order)}
            chains, certain = (
                {places.get(node, ROOT): tokens for node, tokens in of.items()} for of in (chains, certain)
            )
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for node in sorted(chains):  # a tree's nodes are sorted by their probability
            above, dictated = node, certain[node]
            for place, token in enumerate(chains[node][: max(0, self._most - len(tokens))]):
                tokens.append(token)
                parents.append(above)
                above = len(tokens) - 1
                certain[above] = dictated[place + 1 : place + 2]
        added = np.full(len(tokens) - len(tree), SourceName.GRAMMAR, np.uint8)
        return DraftTree(
            tree.root,
            np.array(tokens, np.int64),
            np.array(parents, np.int32),
            np.concatenate([tree.sources, added]),
            _certain(len(tokens), certain),
        )


def _certain(nodes: int, found: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int64]:
    """The token that must follow the root and each node."""
    tokens = np.full(1 + nodes, OPEN, np.int64)
    for node, dictated in found.items():
        if dictated:
            tokens[1 + node] = dictated[0]
    return tokens
