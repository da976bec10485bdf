"""Random draft trees for property tests, and a drafter of random trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.model.pass_inputs import StepInput, StepTensors
from tests.support.families import VOCABULARY


@st.composite
def trees(draw: st.DrawFn, vocabulary: int, max_nodes: int = 20) -> DraftTree:
    """Generate any tree in which a parent precedes its children, including chains, stars and equal siblings."""
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), max_size=max_nodes))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(len(tokens))]
    return DraftTree.of(draw(st.integers(0, vocabulary - 1)), tokens, parents)


def bush(size: int) -> DraftTree:
    """Return a tree with long branches: every node hangs below the one three before it."""
    return DraftTree.of(
        5, [(7 * node + 2) % VOCABULARY for node in range(size)], [max(ROOT, node - 3) for node in range(size)]
    )


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root to ``node``, as a simple reference for faster code."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def tokens_to(tree: DraftTree, node: int) -> list[int]:
    return [tree.root, *(int(tree.tokens[above]) for above in path_to(tree, node))]


class WrongDrafter(Drafter):
    """Drafter of random trees with right and wrong tokens.

    ``truth`` is the answer that the target will give. The target must reject the other tokens.
    """

    def __init__(
        self, prompt_length: int, truth: Sequence[int], vocabulary: int, seed: int, max_nodes: int = 12
    ) -> None:
        super().__init__()
        self._prompt_length = prompt_length
        self._truth = list(truth)
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._max_nodes = max_nodes
        self.drafted = 0
        self.accepted = 0

    def draft(self, context: Sequence[int]) -> DraftTree:
        ahead = self._truth[len(context) - self._prompt_length :]
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(self._random.randrange(self._max_nodes + 1)):
            parent = self._random.randrange(ROOT, node)
            depth = 0 if parent == ROOT else len(path_to(DraftTree.of(0, tokens, parents), parent))
            honest = depth < len(ahead) and self._random.random() < 0.6
            tokens.append(ahead[depth] if honest else self._random.randrange(self._vocabulary))
            parents.append(parent)
        self.drafted += len(tokens)
        return DraftTree.of(context[-1], tokens, parents)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.accepted += len(accepted.path)


def check_integrity(tree: DraftTree) -> None:
    """Assert the invariants of a tree."""
    assert len(tree.tokens) == len(tree.parents) == len(tree.sources)
    assert np.all(tree.parents >= ROOT)
    assert np.all(tree.parents < np.arange(len(tree)))


def step_of(rows: int, lengths: list[int]) -> StepTensors:
    """Return a step's tensors: trees after contexts of these lengths, the first with all rows, and a path to move."""
    step = StepInput(torch.device("cpu"), len(lengths))
    for slot, length in enumerate(lengths):
        nodes = rows - 1 if slot == 0 else (rows - 1) // 2
        tree = DraftTree.of(1, [3] * nodes, [max(ROOT, node - 3) for node in range(nodes)])
        step.fill(slot, tree, rows, length)
    step.move(0, rows, max(0, lengths[0] - 3), [0, 2, 3])
    step.send(len(lengths), rows)
    return step.tensors(len(lengths), rows)
