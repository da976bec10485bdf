"""The default drafter: its estimates against slow counting, its trees, and that it changes nothing that is said."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.builders.evaluation.recording import accept_recorded
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data.documents import Document, InputFile
from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import TIMED_EVERY, Hierarchy
from hdtool.runtime.kernels.compiled import HAS_CLOCK, Array
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, output_tokens, run
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import prompt_of
from tests.support.reference_hierarchy import (
    CONTEXT_ORDERS,
    CORPUS_ORDERS,
    HISTORY_ORDERS,
    LAST_ORDERS,
    MODEL_ORDERS,
    ORDERS,
    RECYCLED_ORDERS,
    Node,
    SlowHierarchy,
)
from tests.support.trees import check_integrity, path_to

Documents = list[list[int]]
NO_LOGITS = Verified(torch.empty(0))
WEIGHTS = {
    SourceId.CONTEXT: slice(CONTEXT_ORDERS, MODEL_ORDERS),
    SourceId.MODEL: slice(MODEL_ORDERS, CORPUS_ORDERS),
    SourceId.CORPUS: slice(CORPUS_ORDERS, RECYCLED_ORDERS),
    SourceId.RECYCLED: slice(RECYCLED_ORDERS, HISTORY_ORDERS),
    SourceId.HISTORY: slice(HISTORY_ORDERS, LAST_ORDERS),
    SourceId.LAST: slice(LAST_ORDERS, ORDERS),
}
"""The rows of the reference's weights."""


def stores_of(folder: Path, documents: Documents, vocabulary: int, shard_bytes: int) -> tuple[ModelStore, CorpusIndex]:
    mark, source = TokenizerFingerprint("test", vocabulary), [InputFile("test", "")]
    given = [Document(ids) for ids in documents]
    build_model_store(folder / "model", given, mark, source, top_k=40, per_key=3)
    build_corpus_index(folder / "corpus", given, mark, source, shard_bytes=shard_bytes, executor=BuildExecutor(1))
    return ModelStore(folder / "model", mark), CorpusIndex(folder / "corpus", mark)


def random_documents(seed: int, vocabulary: int, size: int = 40, alphabet: int = 6) -> Documents:
    """Repetitive ones, at the top of the vocabulary."""
    chance = random.Random(seed)
    words = [[vocabulary - 1 - chance.randrange(alphabet) for _ in range(chance.randrange(1, 5))] for _ in range(5)]
    return [[token for _ in range(8) for token in chance.choice(words)] for _ in range(size)]


def check(tree: DraftTree, probs: Probs, vocabulary: int, max_nodes: int) -> None:
    """What holds of every tree, whatever it was drafted from."""
    check_integrity(tree)
    assert len(probs) == len(tree) <= max_nodes
    assert (np.diff(probs) <= 1e-12).all(), "sorted, so that a smaller tree is a prefix"
    assert ((probs > 0) & (probs <= 1 + 1e-9)).all()
    assert ((tree.tokens >= 0) & (tree.tokens < vocabulary)).all()
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    if len(tree):
        above = np.where(tree.parents < 0, 1.0, probs[tree.parents])
        assert (probs <= above + 1e-12).all()
        assert set(tree.sources.tolist()) <= {1, 2, 3, 5, 6, 7, 12, 13}


@pytest.mark.each_value
@pytest.mark.parametrize("shard_bytes", [1 << 20, 700])
@pytest.mark.parametrize("vocabulary", [50, 70_000])
@pytest.mark.parametrize("used", ["C", "H", "M", "CH", "CM", "S", "CMS", "L", "R", "CL", "CMR", "CHMSLR"])
def test_trees_and_weights_equal_slow_counting(used: str, vocabulary: int, shard_bytes: int, tmp_path: Path) -> None:
    """In one shard and in many; ranges are read whole and in samples; before learning and after; greedy and sampled."""
    documents = random_documents(vocabulary, vocabulary)
    model, corpus = stores_of(tmp_path, documents, vocabulary, shard_bytes)
    assert (len(corpus.shards.extents) > 1) == (shard_bytes == 700)
    stores = model if "M" in used else None, corpus if "S" in used else None
    drafted: set[int] = set()
    for seed, sampled_with in enumerate((None, 7)):
        hierarchy = drafting(used, *stores, max_nodes=24)
        hierarchy.set_seed(sampled_with)
        slow = SlowHierarchy(*stores, used, sampled_with)
        text = [token for ids in random_documents(seed, vocabulary, 6) for token in ids]
        text[30] = 3  # which no store knows
        for start in (1, 20) if sampled_with else (0, 1, 20):
            hierarchy.begin(text[:start])
            slow.begin(text[:start])
            drafted |= check_answer(hierarchy, slow, text, range(start, start + 16), vocabulary, seed)
    assert drafted == {SOURCES[letter] for letter in used}


def check_answer(
    hierarchy: Hierarchy, slow: SlowHierarchy, text: list[int], places: range, vocabulary: int, seed: int
) -> set[int]:
    """Compare all trees and weights while the text at these places is the answer; returns the sources of nodes."""
    drafted: set[int] = set()
    at = places.start
    while at < places.stop:
        tree, expected = hierarchy.draft(text[:at] or [0]), slow.draft(24)
        assert tree.tokens.tolist() == [node.token for node in expected]
        assert [tree.depths[1:].tolist(), tree.sources.tolist()] == [
            [node.depth for node in expected],
            [node.source for node in expected],
        ]
        np.testing.assert_allclose(hierarchy.probs, [node.probs for node in expected], rtol=1e-9)
        ways = [[int(tree.tokens[above]) for above in path_to(tree, node)] for node in range(len(tree))]
        assert [[*text[:at], *way] for way in ways] == [twin.context for twin in expected]
        accepted = accept_recorded(tree, text[at : at + 3])
        logits = logits_favoring(seed + at, len(tree) + 1, vocabulary, text[at : at + 4])
        hierarchy.observe(accepted, Verified(logits))
        for token in accepted.tokens:
            slow.observe_token(token)
        slow.observe_logits([Node(text[:at]), *expected], accepted, logits)
        for source, rows in WEIGHTS.items():
            np.testing.assert_allclose(hierarchy.weights(source), slow.weight[rows], rtol=1e-9)
        at += len(accepted.tokens)
        drafted |= set(tree.sources.tolist())
    return drafted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("used", ["C", "H", "CH"])
def test_trees_of_long_copies_equal_slow_counting(used: str) -> None:
    """Copies of more tokens than a match counts, from the conversation and from earlier answers, with small changes."""
    vocabulary, random_token = 40, random.Random(used)
    passage = [random_token.randrange(vocabulary) for _ in range(50)]
    hierarchy, slow = drafting(used, None, None, max_nodes=24), SlowHierarchy(None, None, used)
    drafted: set[int] = set()
    for number in range(2):
        text = list(passage)
        for copy in range(3):
            changed = list(passage)
            changed[20 + 7 * copy + number] = random_token.randrange(vocabulary)
            text += changed
        hierarchy.begin(text[:60])
        slow.begin(text[:60])
        drafted |= check_answer(hierarchy, slow, text, range(60, 190), vocabulary, number)
    assert drafted == {SOURCES[used[0]]}, "beside the conversation, the history has the smaller share of each node"


SOURCES = {
    "C": SourceId.CONTEXT,
    "H": SourceId.HISTORY,
    "M": SourceId.MODEL,
    "S": SourceId.CORPUS,
    "L": SourceId.LAST,
    "R": SourceId.RECYCLED,
}


def drafting(used: str, model: ModelStore | None, corpus: CorpusIndex | None, max_nodes: int) -> Hierarchy:
    """From the sources of these letters."""
    return Hierarchy(
        model if "M" in used else None,
        corpus if "S" in used else None,
        context="C" in used,
        budget=FixedBudget(max_nodes),
        last="L" in used,
        recycled="R" in used,
        history=History() if "H" in used else None,
    )


def logits_favoring(seed: int, rows: int, vocabulary: int, likely: list[int]) -> torch.Tensor:
    """Random ones, in which some tokens are likely everywhere."""
    logits = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))
    logits[:, likely] += 5.0
    return logits


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 70), st.lists(st.integers(1, 5), max_size=9)
)
def test_every_tree_is_whole(context: list[int], max_nodes: int, strides: list[int]) -> None:
    hierarchy = Hierarchy(budget=FixedBudget(max_nodes))
    hierarchy.begin(context)
    for stride in strides:
        tree = hierarchy.draft(context)
        assert tree.root == context[-1]
        check(tree, hierarchy.probs, 6, min(max_nodes, 64))
        emitted = (context * stride)[:stride]
        hierarchy.observe(Accepted([], emitted), NO_LOGITS)
        context = [*context, *emitted]


def test_a_smaller_tree_is_a_prefix_of_a_larger_one(tmp_path: Path) -> None:
    documents = random_documents(1, 30)
    stores = stores_of(tmp_path, documents, 30, 1 << 20)

    class Half(FixedBudget):
        def choose_size(self, probs: Probs) -> int:
            return len(probs) // 2

    whole, half = Hierarchy(*stores, budget=FixedBudget(32)), Hierarchy(*stores, budget=Half())
    for hierarchy in (whole, half):
        hierarchy.begin(documents[0])
    tree, smaller = whole.draft(documents[0]), half.draft(documents[0])
    assert len(smaller) == len(tree) // 2 == len(half.probs) > 5
    for field in ("tokens", "parents", "sources"):
        assert (getattr(tree, field)[: len(smaller)] == getattr(smaller, field)).all()
    kept = tree.tokens.copy()
    whole.begin([1])
    whole.draft([1])
    assert (tree.tokens == kept).all(), "a tree is its owner's, whatever is drafted later"


def test_no_drafting_costs_nothing_and_forgets_nothing() -> None:
    @dataclass
    class Switch(Budget):
        max_nodes: int = 0

        def choose_size(self, probs: Probs) -> int:
            return len(probs)

    context = [1, 2, 3, 4, 5] * 3
    switch = Switch()
    idle, busy = Hierarchy(budget=switch), Hierarchy(budget=Switch(16))
    for hierarchy in (idle, busy):
        hierarchy.begin(context[:6])
        for token in context[6:]:
            assert hierarchy is busy or len(hierarchy.draft(context)) == 0
            hierarchy.observe(Accepted([], [token]), NO_LOGITS)
    assert len(idle.context_table) == 6 and len(busy.context_table) == 15
    switch.max_nodes = 16
    assert idle.draft(context).tokens.tolist() == busy.draft(context).tokens.tolist()
    for source in WEIGHTS:
        np.testing.assert_array_equal(idle.weights(source), busy.weights(source))


def test_the_next_turn_continues_and_another_conversation_does_not() -> None:
    hierarchy = Hierarchy()
    hierarchy.begin([1, 2, 3])
    hierarchy.observe(Accepted([], [4, 5]), NO_LOGITS)
    hierarchy.begin([1, 2, 3, 4, 5, 6, 3, 4])
    assert hierarchy.draft([4]).tokens[0] == 5
    hierarchy.begin([9, 3, 4])
    assert len(hierarchy.draft([4])) == 0


def test_the_time_is_shared_out_by_source(tmp_path: Path) -> None:
    documents = random_documents(2, 30)
    hierarchy = Hierarchy(*stores_of(tmp_path, documents, 30, 1 << 20))
    assert hierarchy.seconds == {}
    hierarchy.begin(documents[0])
    for token in documents[1]:
        hierarchy.draft(documents[0])
        hierarchy.observe(Accepted([], [token]), NO_LOGITS)
    seconds = hierarchy.seconds
    if HAS_CLOCK:
        assert {SourceId.CONTEXT, SourceId.MODEL, SourceId.CORPUS} <= set(seconds)
        assert all(0 < part < 10 for part in seconds.values())
    else:
        assert seconds == {}


def test_the_time_of_no_source_goes_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timed draft spends its time in the model store, the second one in the context table."""
    hierarchy = Hierarchy()
    spent_in = [SourceId.MODEL] * TIMED_EVERY + [SourceId.CONTEXT] * TIMED_EVERY

    def grow_all(addresses: Array, max_nodes: Array, grown: Array) -> None:
        hierarchy._laps[:] = 0
        hierarchy._laps[spent_in.pop(0)] = 1000

    monkeypatch.setattr("hdtool.runtime.drafters.hierarchy.hierarchy.grow_all", grow_all)
    monkeypatch.setattr("hdtool.runtime.drafters.hierarchy.hierarchy.HAS_CLOCK", True)
    before: dict[SourceId, float] = {}
    while spent_in:
        hierarchy.draft([1])
        now = hierarchy.seconds
        assert all(now.get(source, 0.0) >= seconds for source, seconds in before.items())
        before = now
    assert before.keys() == {SourceId.MODEL, SourceId.CONTEXT}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_recycled_logits_are_the_best_of_the_rows(dtype: torch.dtype) -> None:
    """Random logits: what was likeliest after a token is drafted when the token is there again."""
    hierarchy = Hierarchy(recycled=True)
    hierarchy.begin([1, 2, 3, 1, 2])
    tree = hierarchy.draft([2])
    assert tree.tokens.tolist()[:2] == [3, 1]
    logits = torch.randn((len(tree) + 1, 500), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, :] = -torch.inf
    logits[0, [7, 300]] = 5.0
    logits[1, :] = torch.nan
    verified = int(np.flatnonzero(tree.tokens == 1)[0]) + 1  # of several the likeliest
    hierarchy.observe(Accepted([], [400]), Verified(logits))
    assert len(hierarchy.draft([400])) == 0
    hierarchy.observe(Accepted([], [1]), NO_LOGITS)
    after = hierarchy.draft([1])
    check(after, hierarchy.probs, 500, 32)
    below = after.tokens[after.parents == -1].tolist()
    assert set(below) - {2} <= set(logits[verified].float().topk(8).indices.tolist())
    assert SourceId.RECYCLED in after.sources


def one_hot(tokens: list[int]) -> torch.Tensor:
    logits = torch.full((len(tokens), 20), -torch.inf)
    logits[range(len(tokens)), tokens] = 1.0
    return logits


def test_what_was_thought_at_the_same_place_counts_behind_another_token() -> None:
    below = []
    for thought in (8, 6):
        hierarchy = Hierarchy(recycled=True)
        hierarchy.begin([3, 5, 3, 5, 3, 6, 1, 2, 7, 1])
        tree = hierarchy.draft([1])
        assert tree.tokens.tolist()[0] == 2
        logits = one_hot([3, thought, *[9] * (len(tree) - 1)])
        # Not the 2 that was drafted, behind which 6 was expected.
        hierarchy.observe(Accepted([], [3]), Verified(logits))
        tree = hierarchy.draft([3])
        below.append(tree.tokens[tree.parents == -1].tolist())
    assert below == [[5, 6], [6, 5]]
    hierarchy.observe(Accepted([], [3]), NO_LOGITS)
    tree = hierarchy.draft([3])
    assert tree.tokens[0] == 5, "it speaks of its own place alone"


def test_the_last_logit_gives_what_stood_beside_the_root() -> None:
    hierarchy = Hierarchy(last=True)
    hierarchy.begin([1, 2])
    assert len(hierarchy.draft([2])) == 0
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [4, 5, 6]] = torch.tensor([3.0, 2.0, 1.0])
    hierarchy.observe(Accepted([], [5]), Verified(logits))
    tree = hierarchy.draft([5])
    assert tree.tokens.tolist() == [4, 6] and set(tree.sources.tolist()) == {SourceId.LAST}
    assert hierarchy.probs[0] > hierarchy.probs[1]
    hierarchy.observe(Accepted([], [9]), NO_LOGITS)
    assert len(hierarchy.draft([9])) == 0, "nobody knows what stood beside this one"


def test_candidates_come_to_be_worth_what_they_bring() -> None:
    hierarchy = Hierarchy(last=True, context=False)
    hierarchy.begin([0])
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [1, 2, 3]] = torch.tensor([2.0, 1.5, 0.0])
    for turn in range(200):
        hierarchy.observe(Accepted([], [1]), Verified(logits))
        hierarchy.observe(Accepted([], [2 if turn % 2 else 50]), NO_LOGITS)
    share = np.exp(0.75) / (1 + np.exp(0.75))
    learned = hierarchy.weights(SourceId.LAST)[0, 3 * int(8 * share)]
    assert 0.4 < learned < 0.6, "one of them was right every other time"


def test_recycling_survives_a_clipped_tree() -> None:
    hierarchy = Hierarchy(budget=FixedBudget(8), recycled=True)
    hierarchy.begin([1, 2, 3, 1, 2])
    tree = hierarchy.draft([2])
    clipped = tree.within(1, 1 << 30)
    assert 0 < len(clipped) < len(tree)
    hierarchy.observe(Accepted([], [9]), Verified(torch.zeros(len(clipped) + 1, 20)))
    hierarchy.begin([5, 3])
    assert len(hierarchy.draft([3])) == 0, "rows that nobody can tell apart are left alone"


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(), pytest.param(SamplingConfig(temperature=1.0, seed=3), marks=pytest.mark.long)],
    ids=["T 0", "T 1"],
)
def test_every_combination_of_sources_says_the_same(sampling: SamplingConfig, tmp_path: Path) -> None:
    target = Target(model_of("llama"))
    prompts = [prompt_of(length) for length in (20, 31)]
    plain = [answer_of(target, prompt, sampling, 16) for prompt in prompts]
    stores = stores_of(tmp_path, [[*prompts[0], *plain[0]], plain[1]], VOCABULARY, 1 << 20)
    for size in range(1, len(SOURCES) + 1):
        for letters in combinations(SOURCES, size):
            hierarchy = drafting("".join(letters), *stores, max_nodes=24)
            drafted: set[int] = set()
            for prompt, expected in zip(prompts, plain, strict=True):
                steps = run(target, prompt, sampling, 16, drafter=hierarchy)
                assert output_tokens(steps) == expected, letters
                drafted |= {source for step in steps for source in step.tree.sources.tolist()}
            assert drafted <= {SOURCES[letter] for letter in letters}
            assert not {"M", "S", "L", "R"} & set(letters) or drafted


@pytest.mark.parametrize("times", [15, pytest.param(40, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("part", ["slots", "keys", "rows", "documents", "suffixes", "heads", "signposts", "shards"])
@pytest.mark.one_in(2)
def test_damage_costs_a_draft_at_worst(part: str, times: int, tmp_path: Path) -> None:
    chance = random.Random(part)
    documents = random_documents(3, 50, 60)
    model, corpus = stores_of(tmp_path, documents, 50, 1500)
    store = model if part in ("slots", "keys", "rows") else corpus
    path = store.folder / store.manifest.files[part].name
    whole = path.read_bytes()
    for _ in range(times):
        spoiled = bytearray(whole)
        for _ in range(chance.randrange(1, 40)):
            spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
        path.write_bytes(spoiled)
        try:
            hierarchy = Hierarchy(ModelStore(model.folder), CorpusIndex(corpus.folder))
        except StoreError:
            assert part == "shards"
            continue
        for ids in documents[:6]:
            hierarchy.begin(ids)
            for token in documents[7]:
                check(hierarchy.draft(ids), hierarchy.probs, 50, 32)
                hierarchy.observe(Accepted([], [token]), NO_LOGITS)
