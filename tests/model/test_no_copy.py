"""Copies of what holds addresses would read memory that is not theirs: they are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hdtool.data import demo
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.hierarchy.ranking_sources import LogitRecords
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.stores.context_table import ContextTable
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_tokenizer

MAKERS: dict[str, Callable[[], object]] = {
    "Hierarchy": Hierarchy,
    "LogitRecords": lambda: LogitRecords(recycled=True),
    "BatchDrafter": lambda: BatchDrafter(StoreSet(), VllmConfig(), rows=1, max_length=16),
    "CorpusIndex": lambda: CorpusIndex(demo.CORPUS_INDEX),
    "ModelStore": lambda: ModelStore(demo.MODEL_STORE),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_objects_that_hold_addresses_cannot_be_copied(name: str, duplicate: Callable[[Any], object]) -> None:
    for held in (MAKERS[name](), [MAKERS[name]()]):
        if duplicate is copy.copy and isinstance(held, list):
            continue  # a shallow copy of a list has the same members
        with pytest.raises(TypeError, match=f"{name} cannot be copied or pickled.*make a new one"):
            duplicate(held)


def test_a_context_table_holds_no_addresses_and_is_copied_whole() -> None:
    table = ContextTable()
    table.read([1, 2, 3, 1, 2])
    again = copy.deepcopy(table)
    again.add([9])
    assert (len(table), len(again)) == (5, 6)
    assert pickle.loads(pickle.dumps(again)).read([1, 2, 3, 1, 2, 9, 4]) == 1


def test_a_store_set_can_be_pickled() -> None:
    store_set = StoreSet.for_tokenizer(
        load_tokenizer(ModelConfig()), StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
    )
    for again in (copy.deepcopy(store_set), pickle.loads(pickle.dumps(store_set))):
        assert again.corpus is not store_set.corpus
        drafter = drafter_with_budget(FixedBudget, DecodeConfig("hd"), again)
        drafter.begin([1, 2, 3])
        assert drafter.draft([1, 2, 3]).root == 3


def test_a_store_set_keeps_its_identity_when_pickled() -> None:
    loaded = load_tokenizer(ModelConfig())
    checkpoint = Checkpoint("fingerprint", "name")
    store_set = StoreSet.for_tokenizer(
        loaded,
        StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX), namespace="acme"),
        model=checkpoint,
        identified=True,
    )
    again = pickle.loads(pickle.dumps(replace(store_set, history=History())))
    assert again.tokenizer == store_set.tokenizer is not None
    assert (again.checkpoint, again.namespace) == (checkpoint, "acme")
    assert again.history is None, "it is in the memory of the other process"
