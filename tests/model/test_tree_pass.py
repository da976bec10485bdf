"""Passes over trees in one compiled call: logits of the library, and walks and rankings of acceptance and top-k."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.runtime.caches.accepted_path_moves import move_on_device
from hdtool.runtime.caches.kv_cache import HeadShape, KVTensors, LayerShape, StaticKVCache
from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.engine_interface import LOGITS_ONLY, PassOptions, Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import ROOT, UNDETERMINED, DraftTree
from hdtool.runtime.engines.cpu import pass_kernel
from hdtool.runtime.kernels.topk import FOLD, TOPK_BLOCK, FoldedLogits, fold, folded_size, topk
from hdtool.runtime.settings.model import SamplingConfig
from tests.support import fused
from tests.support.families import VOCABULARY
from tests.support.fused import TREE, after, both, widen
from tests.support.one_sequence import OneSequence
from tests.support.oracle import prompt_of
from tests.support.trees import tokens_to, trees

CONTEXT = prompt_of(40)
WALK, RANK, BOTH = PassOptions(walk=True), PassOptions(wants_maxima=True), PassOptions(walk=True, wants_maxima=True)


@pytest.fixture(scope="module")
def one() -> Iterator[OneSequence]:
    with pytest.MonkeyPatch.context() as patches:
        widen(patches)
        yield after(both()[1], CONTEXT, room=200)


def compiled(one: OneSequence, tree: DraftTree, options: PassOptions = LOGITS_ONLY) -> Verified:
    """The outcome of a pass, which compiled code has computed."""
    before = passes_of(one)
    one.verify(tree, options)
    assert passes_of(one) == before + 1
    return one.verified


def passes_of(one: OneSequence) -> int:
    return fused.compiled(one.target).passes


def takes(one: OneSequence, tree: DraftTree) -> bool:
    """Whether compiled code computes a pass over a tree."""
    return fused.compiled(one.target).verify(one.cache, [tree]) is not None


def with_forced_tokens(tree: DraftTree, forced_tokens: list[int]) -> DraftTree:
    return DraftTree(tree.root, tree.tokens, tree.parents, tree.sources, np.array(forced_tokens, np.int64))


@given(tree=trees(VOCABULARY, max_nodes=24), length=st.integers(1, len(CONTEXT)), data=st.data())
def test_the_logits_of_a_node_have_the_bits_of_its_path(
    one: OneSequence, tree: DraftTree, length: int, data: st.DataObject
) -> None:
    kv = one.cache.slots[0].kv
    kv.length = length
    try:
        logits = compiled(one, tree).logits.clone()
        node = data.draw(st.integers(ROOT, len(tree) - 1))
        tokens = tokens_to(tree, node)
        path = DraftTree.of(tokens[0], tokens[1:], range(-1, len(tokens) - 2))
        assert torch.equal(compiled(one, path).logits[-1], logits[node + 1])
    finally:
        kv.length = len(CONTEXT)


@given(tree=trees(3, max_nodes=24), most=st.integers(1, 30))
def test_the_walk_is_that_of_acceptance(one: OneSequence, tree: DraftTree, most: int) -> None:
    found = compiled(one, tree, WALK)
    assert found.walk
    samplers = Sampler(SamplingConfig(), CONTEXT), Sampler(SamplingConfig(), CONTEXT)
    outcomes = found, Verified(found.logits)
    accepted = [accept(tree, outcome, own, max_tokens=most) for outcome, own in zip(outcomes, samplers, strict=True)]
    assert accepted[0] == accepted[1]
    assert samplers[0].context == samplers[1].context


@given(tree=trees(VOCABULARY, max_nodes=12), data=st.data())
def test_after_certain_tokens_no_logits_are_computed(one: OneSequence, tree: DraftTree, data: st.DataObject) -> None:
    of_row = st.sampled_from([UNDETERMINED, 3, VOCABULARY - 1])
    forced_tokens = data.draw(st.lists(of_row, min_size=len(tree) + 1, max_size=len(tree) + 1))
    expected = one.verify(tree).clone()
    one.verify(tree).fill_(torch.nan)
    found = compiled(one, with_forced_tokens(tree, forced_tokens), WALK)
    assert found.walk
    node = ROOT
    for token, child in zip(found.walk.tokens, found.walk.children, strict=True):
        row = node + 1
        assert token == (int(expected[row].argmax()) if forced_tokens[row] == UNDETERMINED else forced_tokens[row])
        assert child == (ROOT if (drafted := tree.child(node, token)) is None else drafted)
        node = child
    for row, token in enumerate(forced_tokens):
        if token == UNDETERMINED:
            assert torch.equal(found.logits[row], expected[row])
        else:
            assert found.logits[row, token] == 0


@pytest.mark.parametrize(
    "forced_tokens", [[UNDETERMINED] * 7, [5] * 7, [5, 8, UNDETERMINED, 3, UNDETERMINED, UNDETERMINED, 1]]
)
def test_an_overflow_is_seen_where_a_token_is_certain(one: OneSequence, forced_tokens: list[int]) -> None:
    weights = one.target.model.model.layers[-1].mlp.down_proj.weight
    before = weights.data.clone()
    try:
        weights.data.fill_(torch.inf)
        found = compiled(one, with_forced_tokens(TREE, forced_tokens), WALK)
        assert found.walk
        assert found.walk.tokens == [] and not found.walk.finite
        sampler = Sampler(SamplingConfig(), CONTEXT)
        assert accept(TREE, found, sampler, max_tokens=9) is None
    finally:
        weights.data.copy_(before)


def test_an_overflow_shows_in_its_own_row_without_logits(one: OneSequence) -> None:
    table, head = fused.compiled(one.target).table, one.target.model.get_output_embeddings()
    hidden, normed = torch.randn(2, 3, table.width)
    hidden[1, 7] = torch.inf
    logits, scratch = torch.empty(3, VOCABULARY), torch.empty(hidden.numel())
    pass_record, outer_record = table.pass_record(1, 3), table.outer_record(3)
    outer_record.normed, outer_record.logits = normed.data_ptr(), logits.data_ptr()
    forced_tokens = np.array([4, 5, UNDETERMINED])
    pass_kernel._write_open_logits(pass_record, outer_record, forced_tokens, hidden.data_ptr(), scratch.data_ptr())
    assert logits[0, 4] == 0 and logits[1, 5].isnan()
    with torch.inference_mode():
        assert torch.equal(logits[2], head(normed)[2])


def test_passes_that_are_not_computed_here(one: OneSequence) -> None:
    assert takes(one, TREE)
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(one, TREE)
    assert not takes(one, DraftTree.of(TREE.root, [VOCABULARY], [ROOT]))
    assert not takes(one, DraftTree.bare(-1))
    kv = one.cache.slots[0].kv
    length, rows = kv.length, len(TREE) + 1
    for end, expected in ((kv.capacity, True), (kv.capacity + 1, False)):
        kv.length = end - rows
        assert takes(one, TREE) == expected
    kv.length = length


@given(
    path=st.lists(st.integers(0, 19), min_size=1, max_size=12, unique=True).map(sorted),
    start=st.integers(0, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    slot=st.integers(0, 2),
)
def test_moved_positions_are_those_of_devices(
    path: list[int], start: int, dtype: torch.dtype, widths: tuple[int, int], slot: int
) -> None:
    shapes = [HeadShape(3, width, dtype, torch.device("cpu")) for width in widths]
    storage = KVTensors.for_layers([LayerShape(*shapes)] * 2, 30, batch=3)
    for tensor in storage.tensors:
        tensor.normal_()
    others = [tensor.clone() for tensor in storage.tensors]
    storage.slot_view(slot).move(start, path)
    move_on_device([other.narrow(1, slot, 1) for other in others], torch.tensor([start]), start + torch.tensor([path]))
    for one, other in zip(storage.tensors, others, strict=True):
        assert torch.equal(one, other)


def test_a_committed_path_follows_the_root() -> None:
    shape = HeadShape(1, 3, torch.bfloat16, torch.device("cpu"))
    cache = StaticKVCache(KVTensors.for_layers([LayerShape(shape, shape)], 8))
    cache.storage.tensors[0].copy_(torch.arange(64.0)[:, None].expand(64, 3))
    cache.commit(1, [1, 4])
    assert cache.length == 3 and cache.storage.tensors[0][0, 0, 0, :5, 0].tolist() == [0, 2, 5, 3, 4]


@given(tree=trees(VOCABULARY, max_nodes=24), forces=st.booleans(), most=st.sampled_from([1, 3, 8]))
def test_rankings_are_those_of_the_logits(one: OneSequence, tree: DraftTree, forces: bool, most: int) -> None:
    rows = [row for row in range(len(tree) + 1) if not forces or row % 3 != 1]
    if forces:
        tree = with_forced_tokens(tree, [3 if row % 3 == 1 else UNDETERMINED for row in range(len(tree) + 1)])
    found = compiled(one, tree, RANK)
    assert found.maxima is not None
    tokens, scores = topk(found.rankable(), most)
    expected = topk(found.logits, most)
    assert tokens[rows].tolist() == expected[0][rows].tolist()
    assert scores[rows].tolist() == expected[1][rows].tolist()
    some = topk(found.rankable()[rows[-1] : rows[-1] + 1], most)
    assert some[0].tolist() == expected[0][rows[-1] :][:1].tolist()


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 1000, 4096 + 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_that_are_folded_in_parts_have_the_same_maxima(vocabulary: int, rows: int) -> None:
    numbers = np.random.default_rng(vocabulary).normal(size=(rows, vocabulary)).astype(np.float32)
    maxima = np.empty((rows, folded_size(vocabulary)), np.float32)
    for row in range(rows):
        for first in range(0, vocabulary, 2 * TOPK_BLOCK):
            part = numbers[row, first : first + 2 * TOPK_BLOCK]
            fold(part, maxima[row, first // FOLD : first // FOLD + folded_size(len(part))])
    found, expected = topk(FoldedLogits(numbers, maxima), 5), topk(torch.from_numpy(numbers), 5)
    assert found[0].tolist() == expected[0].tolist()


@given(
    drawn=st.lists(
        st.tuples(trees(VOCABULARY, max_nodes=9), st.integers(1, 30), st.booleans()), min_size=1, max_size=3
    ),
    forces=st.booleans(),
    rank=st.booleans(),
)
def test_each_slot_of_a_batch_has_the_bits_of_a_pass_of_its_own(
    one: OneSequence, drawn: list[tuple[DraftTree, int, bool]], forces: bool, rank: bool
) -> None:
    target, drafted = one.target, []
    cache = target.allocate(3)
    for slot, (tree, length, _) in enumerate(drawn):
        target.prefill(cache, slot, prompt_of(length), room=20)
        drafted.append(with_forced_tokens(tree, [UNDETERMINED, *[5] * len(tree)]) if forces and slot != 1 else tree)
    before = passes_of(one)
    verified = target.verify(cache, drafted, [PassOptions(walks, rank) for _, _, walks in drawn])
    assert passes_of(one) == before + 1
    assert target.log.context == sum(length for _, length, _ in drawn) // len(drawn)
    rows_computed = fused.compiled(target)._passes[3]._record.pass_record.total_rows
    assert len(drafted) == 1 or rows_computed == sum(len(tree) + 1 for tree in drafted), "no padding"
    for found, tree, (_, length, walks) in zip(verified, drafted, drawn, strict=True):
        assert len(found) == len(tree) + 1
        assert (found.walk is not None) == walks and (found.maxima is not None) == rank
        alone = compiled(after(target, prompt_of(length)), tree, BOTH)
        rows = [0] if tree.forced_tokens is not None else list(range(len(tree) + 1))
        assert torch.equal(found.logits[rows], alone.logits[rows])
        assert not walks or found.walk == alone.walk
        if rank:
            tops = [topk(outcome.rankable(), 4)[0][rows].tolist() for outcome in (found, alone)]
            assert tops[0] == tops[1]
