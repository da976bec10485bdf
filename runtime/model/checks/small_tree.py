"""A small tree to check passes with."""

from __future__ import annotations

from hdtool.runtime.tree import DraftTree


def some_context(length: int, vocabulary: int) -> list[int]:
    """Arbitrary tokens for measurements and checks."""
    return [(7 * place + 3) % vocabulary for place in range(length)]


def small_tree(
    vocabulary: int, number: int = 5, depth: int = 3, length: int = 4
) -> tuple[list[int], DraftTree, list[list[int]]]:
    """A context and a tree of equal paths; wrong masks or positions change the logits of all paths but one."""
    context = some_context(length, vocabulary)
    paths = [[(31 * path + 11 * place + 5) % vocabulary for place in range(depth)] for path in range(number)]
    tokens = [token for path in paths for token in path]
    parents = [node - 1 if node % depth else -1 for node in range(len(tokens))]
    return context, DraftTree.of(context[-1], tokens, parents), paths
