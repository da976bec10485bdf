"""LogitSpec: what its look-ups find against slow ones, how its tree is filled, and what it makes of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import NO_TOKEN, DraftTree
from hdtool.runtime.drafters.published.logitspec import CONTINUATION_LENGTH, MAX_MATCH, UNRANKED, LogitSpec, look_up
from hdtool.runtime.kernels.topk import for_topk, topk
from hdtool.runtime.settings.decoding import DecodeConfig, ReplayConfig
from hdtool.runtime.settings.draft_sources import SourceId
from tests.support.trees import check_integrity, path_to

NO_LOGITS = Verified(torch.empty(0))


def slow_look_up(words: list[int], tail: list[int], wanted: int) -> list[int]:
    """What followed the longest match of the end of ``tail``, of at most three tokens."""
    best: tuple[int, int, int] = (0, 0, 0)
    for end in range(len(words) - 1):
        length = 0
        while length < min(MAX_MATCH, end + 1, len(tail)) and words[end - length] == tail[-1 - length]:
            length += 1
        known = min(wanted, len(words) - 1 - end)
        if length and (length, known, end) > best:
            best = length, known, end
    length, known, end = best
    return words[end + 1 : end + 1 + known] if length else []


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.permutations(range(7)),
    st.integers(0, 7),
    st.lists(st.integers(1, 4), min_size=7, max_size=7),
)
def test_look_ups_equal_slow_ones(words: list[int], order: list[int], count: int, depths: list[int]) -> None:
    candidates = [token for token in order if token != words[-1]][:count]
    ranks = np.full(7, UNRANKED)
    rows, _ = look_up(np.array(words), np.array(candidates, np.int64), np.array(depths), ranks)
    expected = [slow_look_up(words, words, CONTINUATION_LENGTH)]
    for token, depth in zip(candidates, depths, strict=False):
        expected.append([token, *slow_look_up(words, [*words, token], depth - 1)])
    assert [[token for token in row if token != NO_TOKEN] for row in rows.tolist()] == expected
    assert (ranks == UNRANKED).all()


def logits_of(likely: list[int], vocabulary: int = 200) -> torch.Tensor:
    """A row in which these tokens have the highest logits, in this order."""
    logits = torch.full((1, vocabulary), -torch.inf)
    logits[0, likely] = torch.arange(len(likely), 0, -1.0)
    return logits


def drafted(drafter: LogitSpec, context: list[int], likely: list[int]) -> DraftTree:
    drafter.begin(context[:-1])
    drafter.observe(Accepted([], context[-1:]), Verified(logits_of(likely)))
    tree = drafter.draft(context)
    check_integrity(tree)
    return tree


def ways(tree: DraftTree) -> list[list[int]]:
    """From the root to each leaf, sorted."""
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    return sorted([int(tree.tokens[node]) for node in path_to(tree, leaf)] for leaf in leaves)


def test_better_candidates_get_longer_continuations() -> None:
    said = [token for start in range(20, 120) for token in (start, 150, 151, 152, 153)]
    tree = drafted(LogitSpec(), [*said, 7], [7, *range(20, 120)])
    expected = [[start, 150, 151, 152] for start in range(20, 28)] + [[start, 150, 151] for start in range(28, 38)]
    assert ways(tree) == [*expected, [38, 150]], "and then the tree is full"
    assert len(tree) == 64


def test_candidates_without_a_continuation_are_single_nodes() -> None:
    tree = drafted(LogitSpec(), [1, 2, 3], [3, *range(20, 120)])
    assert tree.tokens.tolist() == list(range(20, 80)), "sixty of them"
    assert set(tree.parents.tolist()) == {-1}
    assert set(tree.sources.tolist()) == {SourceId.LAST}


def test_the_continuation_of_the_root_comes_first_and_is_shared() -> None:
    tree = drafted(LogitSpec(), [5, 6, 7, 8, 9, 5], [5, 6, 11])
    assert ways(tree) == [[6, 7, 8, 9, 5], [11]]
    assert tree.sources.tolist().count(SourceId.LAST) == 1
    assert tree.sources[tree.tokens == 11] == SourceId.LAST


def test_without_logits_it_looks_up_the_root_alone() -> None:
    drafter = LogitSpec()
    drafter.begin([1, 2, 3, 1])
    assert drafter.draft([1, 2, 3, 1]).tokens.tolist() == [2, 3, 1]
    drafter.observe(Accepted([], [2]), Verified(logits_of([2, 9])))
    drafter.observe(Accepted([], [3]), NO_LOGITS)
    assert drafter.draft([1, 2, 3, 1, 2, 3]).tokens.tolist() == [1, 2, 3]


def test_the_row_of_the_last_accepted_node_counts() -> None:
    drafter = LogitSpec()
    drafter.begin([1, 2, 3, 1])
    drafter.draft([1, 2, 3, 1])
    rows = torch.cat([logits_of([2, 30]), logits_of([3, 40]), logits_of([9, 50]), logits_of([60])])
    drafter.observe(Accepted([0, 1], [2, 3, 9]), Verified(rows))
    assert drafter.draft([1, 2, 3, 1, 2, 3, 9]).tokens.tolist() == [50]


@pytest.mark.parametrize("max_nodes", [0, 1, 5, 64, 1000])
def test_no_tree_exceeds_its_budget(max_nodes: int) -> None:
    assert len(drafted(LogitSpec(FixedBudget(max_nodes)), [1, 2, 3], list(range(3, 150)))) == min(60, max_nodes)


def test_nodes_that_are_never_accepted_are_no_longer_drafted() -> None:
    """A budget that sends nodes of at least one in ten; the same repetition never goes on as it did before."""

    class OneInTen(FixedBudget):
        def choose_size(self, probs: Probs) -> int:
            return int((probs >= 0.1).sum())

    drafter = LogitSpec(OneInTen(64))
    context = [1, 2, 3, 4] * 3
    drafter.begin(context)
    sizes = []
    for step in range(60):
        tree = drafter.draft([*context, 1, 2, 3])
        sizes.append(len(tree))
        drafter.observe(Accepted([], [100 + step]), Verified(torch.cat([logits_of([9, 8])] * (len(tree) + 1))))
        context += [1, 2, 3, 100 + step]
    assert sizes[0] > 0 and sizes[-1] == 0


KINDS_OF_LOGITS = torch.float64, torch.float32, torch.bfloat16, torch.float16
ODD_LOGITS = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])


@settings(max_examples=80)
@given(
    st.integers(0, 6),
    st.one_of(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([127, 128, 129, 1024, 8192, 20000])),
    st.integers(1, 70),
    st.sampled_from(KINDS_OF_LOGITS),
    st.sampled_from([1000.0, 4.0, 0.5]),
    st.sampled_from([0.0, 0.01, 0.9]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_topk_equals_a_slow_sort(
    rows: int,
    vocabulary: int,
    max_nodes: int,
    kind: torch.dtype,
    levels: float,
    odd: float,
    strided: bool,
    whole: bool,
    seed: int,
) -> None:
    """Of equals the first one first; what is minus infinity, or not a number, has no rank."""
    drawn = torch.Generator().manual_seed(seed)
    logits = (torch.randn((rows, vocabulary), generator=drawn) * levels).round() / 7
    replaced = torch.rand(logits.shape, generator=drawn) < odd
    logits[replaced] = ODD_LOGITS[torch.randint(5, (int(replaced.sum()),), generator=drawn)]
    logits = logits.to(kind)
    logits = logits.T.contiguous().T if strided else logits
    tokens, scores = topk(logits if whole else for_topk(logits)[:], max_nodes)
    assert tokens.shape == scores.shape == (rows, max_nodes)
    for row, values in enumerate(logits.float().tolist()):
        likely = [token for token, value in enumerate(values) if value > -np.inf]
        expected = sorted(likely, key=lambda token: (-values[token], token))[:max_nodes]
        absent = max_nodes - len(expected)
        assert tokens[row].tolist() == expected + [-1] * absent
        assert scores[row].tolist() == [values[token] for token in expected] + [-np.inf] * absent


def test_topk_leaves_nan_out() -> None:
    logits = torch.full((2, 100), torch.nan)
    logits[1, 3] = 0.0
    tokens, scores = topk(logits, 4)
    assert (scores[0] == -np.inf).all() and tokens[1].tolist() == [3, -1, -1, -1]


def test_topk_takes_logits_with_gradients() -> None:
    plain = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    with torch.inference_mode():
        inferred = plain.clone()
    for logits in (plain.clone().requires_grad_(), inferred):
        for rows in (logits, for_topk(logits), Verified(logits, argmax=np.array([1, 0])).rankable()):
            assert topk(rows, 2)[0].tolist() == [[1, 2], [0, 2]]
            assert topk(rows[1:], 2)[0].tolist() == [[0, 2]]


def test_sources_that_a_method_does_not_know_are_refused() -> None:
    assert DecodeConfig("hd+logitspec", sources="R").drafts_from == "R"
    assert DecodeConfig("hd+logitspec").drafts_from == "CMSHLR" and DecodeConfig().drafts_from == "CMSH"
    assert DecodeConfig("logitspec", sources="M").drafts_from == "C"
    with pytest.raises(
        OptionError, match="--sources must be sources of method hd: context, model, corpus, history, got LR"
    ):
        DecodeConfig("hd", sources="LR")
    for method in ("lade", "hd+amphista"):
        with pytest.raises(OptionError, match="cannot be replayed: it computes with the model"):
            ReplayConfig((method,))
