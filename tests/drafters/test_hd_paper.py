"""The paper's policy against the same policy in plain lists, and each of its parts against its own oracle."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.data.errors import OptionError
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, NO_TOKEN, DraftTree, Trie, sequences_of
from hdtool.runtime.drafters.published.hd_paper import SEQUENCE_LENGTH, PaperDrafter, SequenceTable, lookahead_decoding
from hdtool.runtime.settings.decoding import PaperConfig
from hdtool.runtime.settings.draft_sources import SourceId
from tests.support.trees import check_integrity, path_to, tokens_to, trees

Sequences = list[list[int]]

texts = st.lists(st.integers(0, 3), max_size=60)
rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SEQUENCE_LENGTH), max_size=12)


class SlowTable:
    """The table of sequences as lists, the most recent first."""

    def __init__(self, per_key: int) -> None:
        self.per_key = per_key
        self.kept: dict[int, Sequences] = {}

    def add(self, sequence: list[int]) -> None:
        key, follows = sequence[0], sequence[1:]
        others = [held for held in self.kept.get(key, []) if held != follows]
        self.kept[key] = [follows, *others][: self.per_key]

    def add_text(self, tokens: Sequence[int]) -> None:
        for start in range(len(tokens) - SEQUENCE_LENGTH):
            self.add(list(tokens[start : start + SEQUENCE_LENGTH + 1]))


class FewPhrases:
    """A model store that holds what it was given; the most frequent first."""

    def __init__(self, phrases: dict[int, Sequences]) -> None:
        self.phrases = phrases

    def phrases_after(self, token: int, most: int) -> tuple[Any, Any]:
        found = self.phrases.get(token, [])[:most]
        return np.array(found, np.int32).reshape(-1, SEQUENCE_LENGTH), np.zeros(len(found))


class FewTexts:
    """A corpus index that knows what follows some pairs and some single tokens: one chain for each."""

    def __init__(self, after: dict[tuple[int, ...], Sequences]) -> None:
        self.known = after

    def after(self, context: Sequence[int]) -> Any:
        suffix = next((s for s in (tuple(context[-n:]) for n in (2, 1)) if len(s) and s in self.known), ())
        trie = Trie(LARGEST_TREE)
        trie.add(padded(self.known.get(suffix, [])), 0, wanted=100)
        tokens, parents, _ = trie.copy_arrays()
        return SimpleNamespace(tokens=tokens, parents=parents, matched=min(len(suffix), len(context)))


def padded(sequences: Sequences) -> Any:
    return np.array([row + [NO_TOKEN] * (SEQUENCE_LENGTH - len(row)) for row in sequences], np.int32).reshape(
        -1, SEQUENCE_LENGTH
    )


def paths(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Every node by the tokens that lead to it, with its source."""
    found = {tuple(tokens_to(tree, node)[1:]): int(tree.sources[node]) for node in range(len(tree))}
    assert len(found) == len(tree), "what sequences share stands in the tree once"
    return found


def united(sequences: list[tuple[list[int], SourceId]], wanted: int) -> dict[tuple[int, ...], int]:
    """The nodes of the first ``wanted`` sequences that bring any."""
    nodes: dict[tuple[int, ...], int] = {}
    for sequence, source in sequences:
        fresh = [tuple(sequence[:end]) for end in range(1, len(sequence) + 1) if tuple(sequence[:end]) not in nodes]
        if fresh and wanted > 0:
            nodes.update(dict.fromkeys(fresh, int(source)))
            wanted -= 1
    return nodes


@given(st.lists(st.one_of(texts, st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5)))), st.integers(1, 7))
def test_the_table_keeps_the_most_recent(additions: list[Any], per_key: int) -> None:
    table, slow = SequenceTable(per_key), SlowTable(per_key)
    for addition in additions:
        if addition and isinstance(addition[0], list):
            table.add(np.array(addition))
            for sequence in addition:
                slow.add(sequence)
        else:
            table.add_text(addition)
            slow.add_text(addition)
    for token in range(-1, 5):
        assert table.after(token).tolist() == slow.kept.get(token, [])
    table.clear()
    assert not len(table.after(1))


def test_the_table_grows_with_its_keys() -> None:
    table, slow = SequenceTable(2), SlowTable(2)
    text = [(7919 * place * place) % 250_007 for place in range(9_000)]
    for start in range(0, len(text), 1000):
        table.add_text(text[start : start + 1000])
        slow.add_text(text[start : start + 1000])
    assert {token: table.after(token).tolist() for token in slow.kept} == slow.kept
    assert not len(table.after(10**9))


@given(st.lists(st.tuples(rows, st.integers(0, 8)), max_size=4))
def test_sequences_are_united(additions: list[tuple[Sequences, int]]) -> None:
    trie = Trie(LARGEST_TREE)
    nodes: dict[tuple[int, ...], int] = {}
    for source, (sequences, wanted) in enumerate(additions):
        brought = trie.add(padded(sequences), source, wanted=wanted)
        expected = 0
        for row in sequences:
            before = len(nodes)
            if expected < wanted:
                for end in range(1, len(row) + 1):
                    nodes.setdefault(tuple(row[:end]), source)
            expected += len(nodes) > before
        assert brought == expected
    tree = DraftTree(0, *trie.copy_arrays())
    check_integrity(tree)
    assert paths(tree) == nodes
    trie.clear()
    assert len(trie) == 0


def test_a_full_tree_takes_no_more() -> None:
    trie = Trie(6)
    assert trie.add(np.arange(16).reshape(4, 4), 1, wanted=7) == 2
    tree = DraftTree(0, *trie.copy_arrays())
    assert set(paths(tree)) == {(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (4,), (4, 5)}
    assert trie.add(np.arange(100, 104).reshape(1, 4), 1, wanted=7) == 0


def test_a_tree_is_appended_to_the_sequences() -> None:
    trie = Trie(6, extra=3)
    for size in (0, 4, 6):
        trie.clear()
        trie.add(np.arange(8).reshape(2, 4), 1, wanted=size // 3)
        trie.append_tree(np.array([0, 8, 9]), np.array([-1, 0, -1], np.int32), 4)
        tokens, parents, sources = trie.copy_arrays()
        start = len(trie) - 3
        assert (start, tokens[start:].tolist()) == (size, [0, 8, 9])
        assert parents[start:].tolist() == [-1, start, -1]
        assert sources.tolist() == [1] * start + [4] * 3


@given(trees(3), st.integers(1, 8))
def test_a_tree_falls_apart_into_its_sequences(tree: DraftTree, most: int) -> None:
    expected = []
    for node in range(len(tree)):
        depth = len(path_to(tree, node))
        if depth == SEQUENCE_LENGTH or (depth < SEQUENCE_LENGTH and node not in tree.parents):
            expected.append(tokens_to(tree, node)[1:])
    found = sequences_of(tree.tokens, tree.parents, SEQUENCE_LENGTH, most)
    assert found.tolist() == padded(expected[:most]).tolist()


PHRASES = {token: [[token, 1, 1, other] for other in range(5)] + [[0, 1, 2, 3]] for token in range(3)}
TEXTS = {
    (0,): [[1, 2, 3, 0], [2]],
    (1,): [[3, 3, 3, 3], [0, 1, 2, 3], [0, 1], [2, 2, 2, 2]],
    (0, 1): [[3, 3, 3, 3], [1]],
    (2, 2): [[2, 2, 2, 2]],
    (3, 3): [],
}


def slow_draft(context: list[int], order: str, most: int) -> dict[tuple[int, ...], int]:
    table = SlowTable(most)
    table.add_text(context)
    fetched: list[tuple[list[int], SourceId]] = []
    for letter in order:
        if letter == "C":
            fetched += [(sequence, SourceId.CONTEXT) for sequence in table.kept.get(context[-1], [])]
        elif letter == "M":
            fetched += [(sequence, SourceId.MODEL) for sequence in PHRASES.get(context[-1], [])[:most]]
        else:
            for suffix in (tuple(context[-2:]), tuple(context[-1:])):
                trie = Trie(LARGEST_TREE)
                trie.add(padded(TEXTS.get(suffix, [])), 0, wanted=100)
                tokens, parents, _ = trie.copy_arrays()
                for row in sequences_of(tokens, parents, SEQUENCE_LENGTH, most).tolist():
                    fetched.append(([token for token in row if token != NO_TOKEN], SourceId.CORPUS))
    return united(fetched, most)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50), st.permutations("CMS"), st.integers(1, 3), st.data())
def test_databases_are_asked_in_order(context: list[int], order: list[str], use: int, data: st.DataObject) -> None:
    """Any order and any part of it, fed step by step: the same tree as from lists fed at once."""
    letters = "".join(order[:use])
    most = data.draw(st.integers(1, 7))
    store: Any = FewPhrases(PHRASES)
    index: Any = FewTexts(TEXTS)
    config = PaperConfig(order=letters, sequences=most, lookahead=False)
    drafter = PaperDrafter(config, model_store=store, corpus_index=index)
    for _ in range(2):  # the second generation must know nothing of the first
        start = data.draw(st.integers(1, len(context)))
        drafter.begin(context[:start])
        for end in [*sorted(data.draw(st.sets(st.integers(start, len(context)), max_size=3))), len(context)]:
            tree = drafter.draft(context[:end])
            check_integrity(tree)
            assert paths(tree) == slow_draft(context[:end], letters, most)
    named = {"C": SourceId.CONTEXT, "M": SourceId.MODEL, "S": SourceId.CORPUS}
    assert set(tree.sources.tolist()) <= {named[letter] for letter in letters}


def test_databases_that_are_not_there_are_passed_over() -> None:
    drafter = PaperDrafter(PaperConfig(order="MSC", lookahead=False))
    drafter.begin([1, 2, 3, 4, 5, 1])
    assert paths(drafter.draft([1, 2, 3, 4, 5, 1])) == {(2,): 1, (2, 3): 1, (2, 3, 4): 1, (2, 3, 4, 5): 1}


@pytest.mark.parametrize("wrong", [{"order": "CX"}, {"order": "CC"}, {"order": ""}, {"sequences": 0}, {"window": 10}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        PaperConfig(**wrong)


def saying(tokens: Sequence[int]) -> Verified:
    """Logits with these tokens as their arg-max, one for each row."""
    return Verified(torch.nn.functional.one_hot(torch.tensor(tokens), 200).float())


def test_the_lookahead_branch_feeds_the_table() -> None:
    """Three steps fill the window; from the fourth on, seven sequences are learned in each."""
    prompt = [1, 2, 3, 4, 5, 6]
    drafter = lookahead_decoding()
    drafter.begin(prompt)
    drafter.observe(Accepted([], [7]), saying([7]))
    for step in range(4):
        tree = drafter.draft([*prompt, *range(7, 8 + step)])
        assert set(tree.sources.tolist()) == {SourceId.LOOKAHEAD}, "nothing in the table starts with a new token"
        drafter.observe(Accepted([], [8 + step]), saying([100 + step] * (len(tree) + 1)))
    tree = drafter.draft([*prompt, *range(7, 12)])
    assert drafter._table.after(10).tolist() == [[100, 101, 102, 103]]
    drafts = tree.sources != SourceId.LOOKAHEAD
    assert not drafts.any()
    assert drafter.draft([*prompt, *range(7, 12), 10]).tokens.tolist()[:4] == [100, 101, 102, 103]
    assert all(seconds >= 0 for seconds in drafter.seconds.values())
    assert drafter.seconds[SourceId.LOOKAHEAD] > 0


def test_only_the_tree_that_was_drafted_is_learned_from() -> None:
    """Clipped near the end, or never drafted: the rows of the logits are not those of its nodes."""
    drafter = PaperDrafter()
    prompt = [1, 2, 3, 4, 5, 1]
    drafter.begin(prompt)
    window = drafter._lookahead
    assert window
    start = window.branch()[0].tolist()
    drafter.observe(Accepted([], [1]), saying([1]))
    tree = drafter.draft(prompt)
    clipped = tree.within(2, 1 << 30)
    assert len(clipped) < len(tree)
    drafter.observe(Accepted([], [2]), saying([2] * (len(clipped) + 1)))
    assert window.branch()[0].tolist() == start
    tree = drafter.draft([*prompt, 2])
    drafter.observe(Accepted([], [3]), Verified(torch.empty(len(tree) + 1, 0)))
    assert window.branch()[0].tolist() == start
    tree = drafter.draft([*prompt, 2, 3])
    drafter.observe(Accepted([], [3]), saying([9] * (len(tree) + 1)))
    assert window.branch()[0].tolist() != start
