"""The lookahead branch against Lookahead Decoding done slowly: plain lists, one plain forward pass a guess."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.published.lookup_methods import Lookahead
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import plain_logits, prompt_of
from tests.support.trees import check_integrity, tokens_to

WIDTH, LENGTH = 7, 5
ROWS = LENGTH - 1


class Window:
    """The window as the paper draws it: in row 0 the guesses after the root, below it full rows."""

    def __init__(self, guesses: list[int]) -> None:
        self.rows = [guesses]

    def column(self, column: int, root: int) -> list[int]:
        """The tokens that the newest guess of a column follows, from the root down to it."""
        chain = [root, *self.rows[0]][: column + 1]
        return chain + [row[column] for row in self.rows[1:]]

    def move(self, said: list[int]) -> None:
        """``said`` is the arg-max after the newest guess of each column, the root included."""
        if len(self.rows) < ROWS:
            self.rows = [*(row[1:] for row in self.rows), said[1:]]
        else:
            self.rows = [self.rows[1][1:], *self.rows[2:], said]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_window_moves_as_in_lookahead_decoding(family: str) -> None:
    """The branch verified with the target's masks has the logits of the plain model at each node."""
    model = model_of(family, torch.float64)
    one = OneSequence(Target(model))
    prompt = prompt_of(25)
    sampler = Sampler(SamplingConfig(), prompt)
    branch = Lookahead(WIDTH, LENGTH)
    branch.begin(prompt)
    window = Window(branch.branch()[0].tolist())
    assert set(window.rows[0]) <= set(prompt)
    one.prefill(prompt, room=80)
    accepted = accept(DraftTree.bare(prompt[-1]), one.verified, sampler, max_tokens=80)
    for _ in range(12):
        context = list(sampler.context)
        root = context[-1]
        tokens, parents = branch.branch()
        tree = DraftTree.of(root, tokens.tolist(), parents.tolist(), SourceId.LOOKAHEAD)
        check_integrity(tree)
        assert tree.tokens.tolist() == [token for row in window.rows for token in row]
        logits = one.verify(tree)
        accepted = accept(tree, one.verified, sampler, max_tokens=80)
        assert accepted
        one.commit(accepted.path)

        columns = [window.column(column, root) for column in range(len(window.rows[0]) + 1)]
        said = [int(plain_logits(model, context[:-1] + path).argmax()) for path in columns]
        closed = branch.observe(root, argmax(logits[-branch.num_observed :]))
        if len(window.rows) < ROWS:
            assert len(closed) == 0
        else:
            # A sequence begins at the bottom of the chain above its column and ends with the model's arg-max.
            assert closed.tolist() == [[*path[-ROWS:], token] for path, token in zip(columns, said, strict=True)]
        window.move(said)
    assert [len(row) for row in window.rows] == [WIDTH - 1, *[WIDTH] * (ROWS - 1)]
    assert sampler.context[: len(prompt)] == prompt


@given(st.integers(1, 9), st.integers(3, 6), st.integers(0, 8))
def test_the_branch_is_the_mask_of_lookahead_decoding(width: int, length: int, steps: int) -> None:
    """Row 0 is causal; a guess below it sees row 0 up to its column, its column above it, and itself."""
    branch = Lookahead(width, length)
    branch.begin([3, 4, 5])
    rows = 1
    for step in range(steps):
        said = np.arange(len(branch.branch()[0])) + 1000 * (step + 1)
        closed = branch.observe(9, said[-branch.num_observed :])
        assert len(closed) == (width if rows == length - 1 else 0)
        rows = min(rows + 1, length - 1)
    columns = width + length - 1 - rows
    tokens, parents = branch.branch()
    assert len(tokens) == len(parents) == columns * rows - 1 <= branch.max_nodes
    tree = DraftTree.of(9, tokens.tolist(), parents.tolist())
    check_integrity(tree)
    for row in range(rows):
        for column in range(columns):
            node = row * columns + column - 1  # the root is the first of them
            path = [9, *tokens[:column].tolist()]
            path += [int(tokens[above * columns + column - 1]) for above in range(1, row + 1)]
            assert tokens_to(tree, node) == path
            assert tree.depths[node + 1] == row + column


def test_the_same_prompt_starts_the_same_window() -> None:
    prompt = prompt_of(30)
    branch, other = Lookahead(WIDTH, LENGTH), Lookahead(WIDTH, LENGTH)
    branch.begin(prompt)
    branch.observe(1, np.arange(9))
    branch.begin(prompt)
    other.begin(prompt)
    assert branch.branch()[0].tolist() == other.branch()[0].tolist()
    branch.begin([7])
    assert branch.branch()[0].tolist() == [7] * (WIDTH + ROWS - 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_argmax_is_the_choice_of_greedy_sampling(dtype: torch.dtype) -> None:
    logits = torch.randint(-5, 5, (40, 300), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = -torch.inf
    logits[2, [40, 90]] = torch.nan
    logits[3] = torch.nan
    logits[4, [7, 8]] = torch.tensor([9, 9 + 9 * torch.finfo(dtype).eps], dtype=dtype)  # the next number there is
    expected = logits.argmax(dim=-1).tolist()
    assert expected[1:5] == [0, 40, 0, 8]
    assert argmax(logits).tolist() == expected
    assert [int(argmax(row)) for row in logits] == expected
    assert argmax(logits[:0]).tolist() == []
    for kind in (logits, logits.clone().requires_grad_(), logits.T.clone().T):
        steps = (
            accept(DraftTree.bare(1), Verified(row[None]), Sampler(SamplingConfig(), [1]), max_tokens=1) for row in kind
        )
        assert [step.tokens for step in steps if step] == [[token] for token in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_acceptance_looks_only_at_the_rows_that_it_reaches(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=dtype)
    choose = Sampler(SamplingConfig(), [1]).chooser(logits)
    assert choose(0) == 1
    logits[1, 0] = 2.0
    assert choose(1) == 0
