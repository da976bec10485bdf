"""Drafting for the rows of a vLLM batch: matching of requests, drafts and costs."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hdtool.data import demo
from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE
from hdtool.runtime.settings.decoding import NO_HISTORY
from hdtool.runtime.stores.context_table import CONTEXT_TABLE, ContextTable, holds
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from tests.support.vllm_batch import MAX_MODEL_LENGTH, ROWS, TOKENS, engine

SAID = [11, 12, 13, 14, 15, 16, 17, 18]


def test_a_chain_continues_as_the_context_did() -> None:
    asked = engine(SAID + SAID + SAID[:3], [1, 2, 3])
    assert asked.drafts() == [SAID[3:] + SAID[:1], []]


def test_every_row_is_drafted_for_as_if_it_were_alone() -> None:
    contexts = [[number + token for token in SAID * 2] + [number + 11, number + 12] for number in range(0, 80, 20)]
    alone = [engine(context).drafts()[0] for context in contexts]
    assert all(alone)
    assert engine(*contexts).drafts() == alone


def test_stores_are_drafted_from() -> None:
    store_set = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))
    start = CorpusIndex(demo.CORPUS_INDEX).shards.tokens[:5].tolist()
    assert engine(start, store_set=store_set).drafts() != [[]]
    assert engine(start).drafts() == [[]]


def test_no_token_beyond_the_models_vocabulary() -> None:
    context = SAID + SAID + SAID[:3]
    assert max(engine(context).drafts()[0]) == 18
    assert engine(context, vocabulary=17).drafts() == [SAID[3:6]]


def test_a_draft_ends_before_the_context_does() -> None:
    context = SAID + SAID + SAID[:3]
    assert [len(engine(context, max_length=len(context) + room).drafts()[0]) for room in range(4)] == [0, 0, 1, 2]


def test_improbable_drafts_are_dropped() -> None:
    doubtful = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 8, 1]
    bold, careful = engine(doubtful, min_draft_prob=0.02).drafts()[0], engine(doubtful, min_draft_prob=0.7).drafts()[0]
    assert len(careful) < len(bold)
    assert careful == bold[: len(careful)]


def test_a_high_minimum_leaves_out_no_draft_that_reaches_it() -> None:
    """It bounds what is sent, and not what is known of a token."""
    store_set = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))
    text = store_set.corpus.shards.tokens.tolist()  # type: ignore[union-attr]
    reaching = sent = 0
    for start in range(0, 30_000, 1500):
        context = text[start : start + 200]
        asked = engine(context, min_draft_prob=0.001, store_set=store_set)
        drafts = asked.drafts()[0]
        probs = asked.drafter._hierarchy.work[0]["probs"][1 : len(drafts) + 1]
        likely = drafts[: int((probs >= 0.3).sum())]
        found = engine(context, min_draft_prob=0.3, store_set=store_set).drafts()[0]
        assert found == drafts[: len(found)]
        reaching, sent = reaching + len(likely), sent + len(found)
    assert reaching > 20
    assert sent > 0.9 * reaching


def test_a_row_that_still_reads_its_prompt_gets_nothing() -> None:
    context = SAID + SAID + SAID[:3]
    assert engine(context, context).drafts([False, True]) == [[], SAID[3:] + SAID[:1]]


def test_nothing_is_drafted_where_no_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine(SAID + SAID + SAID[:3], min_draft_prob=None)
    assert asked.drafts() != [[]]
    monkeypatch.setattr(asked.drafter.min_probability, "floor", lambda rows: NO_DRAFT_ABOVE)
    assert asked.drafts() == [[]]


def test_passes_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    asked = engine(SAID + SAID + SAID[:3], [1, 2, 3])
    monkeypatch.setattr(asked.drafter.min_probability, "observe", lambda *told: heard.append(told[:3]))
    taken = len(asked.drafts()[0]) - 1
    asked.requests = [
        tokens + (SAID * 2)[3 : 4 + more] for tokens, more in zip(asked.requests, (taken, 0), strict=True)
    ]
    asked.drafts()
    asked.drafts([True, False])
    assert heard == [(2, 2 + taken + 1, 2 + taken)], "of two rows, of which one took all drafts but the last"


def test_a_new_request_in_a_row_starts_with_an_empty_table() -> None:
    """As long as the one before, with the same last words: only its first token tells them apart."""
    asked = engine([1, *SAID, 2, 3, 4])
    asked.drafts()
    asked.requests = [[5, *SAID, 2, 3, 4, 1]]
    assert asked.drafts() == [[]], "behind 1 the other request said 11"


def test_moved_rows_keep_their_tables() -> None:
    asked = engine(*([number, *SAID] for number in range(1, 6)))
    asked.drafts()
    asked.requests = [asked.requests[row] + SAID[:2] for row in (4, 0, 2)]
    assert asked.drafts() == [SAID[2:]] * 3
    assert len(asked.drafter) == 5


def test_tables_are_as_many_as_requests_at_once_and_no_more() -> None:
    asked = engine([1, 2], [3, 4])
    for number in range(100):
        asked.requests = [[number, 1, 2], [number, 3, 4]]
        asked.drafts()
    assert len(asked.drafter) == 2


def test_memory_for_context_tables_has_a_bound() -> None:
    contexts = [[number, *SAID, *SAID[:3]] for number in range(1, 6)]
    asked = engine(*contexts, context_mib=2)
    drafts = asked.drafts()
    assert len(asked.drafter) == asked.drafter.max_tables == sum(map(bool, drafts))
    assert asked.drafter.max_tables * CONTEXT_TABLE.itemsize <= 2 << 20
    assert drafts == asked.drafts(), "those that have a table keep it"


def test_no_request_ever_drafts_from_another_without_a_history() -> None:
    """An engine that starts, ends, moves, holds back and takes up requests at random, many of them alike."""
    chance = random.Random(1)
    asked, held_back = engine(history=NO_HISTORY), []
    for turn in range(400):
        requests = [tokens + chance.choices(SAID, k=chance.randint(1, 3)) for tokens in asked.requests]
        requests = [
            tokens for tokens in requests if chance.random() > 0.05 and len(tokens) < MAX_MODEL_LENGTH - TOKENS - 4
        ]
        if requests and chance.random() < 0.2:
            held_back.append(requests.pop(chance.randrange(len(requests))))
        if held_back and len(requests) < ROWS and chance.random() < 0.3:
            requests.append(held_back.pop(0))
        while len(requests) < ROWS and chance.random() < 0.6:
            # A word of its own in the middle of words of all; some prompts are the same but for that word.
            requests.append([*SAID, 1000 + turn * ROWS + len(requests), *SAID[:4], *chance.choices(SAID, k=2)])
        if chance.random() < 0.3:
            chance.shuffle(requests)
        asked.requests = requests
        for tokens, draft in zip(requests, asked.drafts(), strict=True):
            pairs = set(itertools.pairwise(tokens))
            assert all(pair in pairs for pair in zip([tokens[-1], *draft], draft, strict=False))
    assert len(asked.drafter) <= ROWS


def test_a_request_drafts_from_earlier_answers() -> None:
    answer = [30, 31, 32, 33, 34, 35]
    asked = engine([1, 2, 3])
    for end in range(len(answer)):
        asked.requests = [[1, 2, 3, *answer[: end + 1]]]
        asked.drafts()
    asked.requests = [[4, 5, 3, *answer[:2]]]
    assert asked.drafts()[0][:2] == answer[2:4]
    forgetful = engine([4, 5, 3, *answer[:2]], history=NO_HISTORY)
    assert forgetful.drafts() == [[]]


def test_tenants_never_share_a_history() -> None:
    """Two servers answer 1,000 requests with a word of their own in it; neither ever drafts the other's."""
    chance, words = random.Random(2), (900, 901)
    servers = engine(), engine()
    for turn in range(1000):
        number = turn % 2
        server, prompt = servers[number], [*SAID, turn % 50]
        answer = [*SAID[:3], words[number], *SAID[2:], *chance.choices(SAID, k=3)]
        for end in range(2, len(answer), 3):
            server.requests = [[*prompt, *answer[:end]]]
            assert words[1 - number] not in server.drafts()[0]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_contexts_are_compared_whole(length: int) -> None:
    table = ContextTable()
    context = np.resize(np.array(SAID, np.int32), length + 1)
    table.add(context[:length])
    assert holds(table.memory[0], context) and holds(table.memory[0], context[:length])
    assert not holds(table.memory[0], context[: length - 1])
    for place in {0, length // 2, length - 1}:
        other = context.copy()
        other[place] += 1
        assert not holds(table.memory[0], other)
