"""The draft tree against the slow and obvious way to walk it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from hdtool.runtime.core.tree import ROOT, DraftTree
from tests.support.trees import check_integrity, path_to, tokens_to, trees


@given(trees(vocabulary=5, max_nodes=40))
def test_the_ancestor_mask_is_the_path_to_each_node(tree: DraftTree) -> None:
    check_integrity(tree)
    for node in range(len(tree)):
        expected = np.zeros(len(tree) + 1, bool)
        expected[[0, *(above + 1 for above in path_to(tree, node))]] = True
        assert (tree.ancestor_mask[node + 1] == expected).all()
        assert tree.depths[node + 1] == len(path_to(tree, node))
    assert tree.ancestor_mask[0].tolist() == [True] + [False] * len(tree)


@given(trees(vocabulary=5), st.integers(0, 6))
def test_clipping_keeps_exactly_the_shallow_paths(tree: DraftTree, depth: int) -> None:
    clipped = tree.within(depth, 1 << 30)
    check_integrity(clipped)
    shallow = [tokens_to(tree, node) for node in range(len(tree)) if len(path_to(tree, node)) <= depth]
    assert [tokens_to(clipped, node) for node in range(len(clipped))] == shallow


@given(trees(vocabulary=3), st.integers(0, 2))
def test_a_child_has_the_parent_and_the_token(tree: DraftTree, token: int) -> None:
    for parent in range(ROOT, len(tree)):
        fitting = [node for node in range(len(tree)) if tree.parents[node] == parent and tree.tokens[node] == token]
        assert tree.child(parent, token) == (fitting[0] if fitting else None)


def test_a_bare_tree_is_its_root() -> None:
    tree = DraftTree.bare(7)
    assert len(tree) == 0
    assert tree.ancestor_mask.tolist() == [[True]]
    assert tree.within(0, 1 << 30) is tree
