"""SGLang's own registry, plug-in loader and n-gram worker with hdtool's trees; the model is a function."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.ngram_worker import _derive_tree_links
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.integrations.sglang_algorithm import HierarchyAlgorithm
from hdtool.runtime.integrations.sglang_corpus import HierarchyCorpus, drafters_of
from hdtool.runtime.integrations.sglang_plugin import ALGORITHM
from hdtool.runtime.integrations.sglang_worker import HierarchyWorker
from hdtool.runtime.stores.history_store import History

NODES, LENGTH = 8, 40


class Request:
    def __init__(self, rid: str, prompt: list[int]) -> None:
        self.rid, self.origin_input_ids_unpadded, self.output_ids = rid, array("q", prompt), array("q")


def following(context: list[int]) -> int:
    """A model: the next token depends on the last two, and repeats after a while."""
    return (context[-1] * 7 + context[-2] * 3 + 1) % 23


def worker(history: History) -> HierarchyWorker:
    """A worker as its constructor leaves it, without a target model."""
    made = HierarchyWorker.__new__(HierarchyWorker)
    made.enable_overlap, made.draft_token_num, made.max_trie_depth = False, NODES, NODES + 1
    made.ngram_corpus = HierarchyCorpus(lambda: Hierarchy(budget=FixedBudget(NODES - 1), history=history), NODES, 23)
    made._running = WeakValueDictionary()
    return made


def answer(one: HierarchyWorker, requests: list[Request]) -> int:
    """Answer all requests as SGLang does without overlap; the number of passes."""
    for request in requests:
        request.output_ids.append(following(list(request.origin_input_ids_unpadded)))
    passes = 0
    while running := [request for request in requests if len(request.output_ids) < LENGTH]:
        batch: Any = SimpleNamespace(reqs=running, spec_info=None, grammar_needs_sync=lambda: False)
        tokens, mask = one._prepare_draft_tokens(batch)
        children, siblings = _derive_tree_links(mask, len(running), NODES)
        passes += 1
        one._update_ngram_corpus(batch)
        for row, request in enumerate(running):
            drafted, node = tokens[row * NODES : (row + 1) * NODES].tolist(), 0
            context = [*request.origin_input_ids_unpadded, *request.output_ids]
            assert drafted[0] == context[-1]
            while node >= 0:
                context.append(following(context))
                node = int(children[row, node])
                while node >= 0 and drafted[node] != context[-1]:
                    node = int(siblings[row, node])
            request.output_ids = array("q", context[len(request.origin_input_ids_unpadded) :][:LENGTH])
            if len(request.output_ids) == LENGTH:
                one.note_request_finished(rid=request.rid, natural_stop=True)
    return passes


def plain(prompt: list[int]) -> list[int]:
    context = list(prompt)
    while len(context) < len(prompt) + LENGTH:
        context.append(following(context))
    return context[len(prompt) :]


def test_the_plugin_registers_an_ngram_algorithm_with_our_worker() -> None:
    load_plugins()
    algorithm = SpeculativeAlgorithm.from_string("hdtool")
    assert isinstance(algorithm, HierarchyAlgorithm) and algorithm.name == ALGORITHM
    assert algorithm.is_ngram() and not algorithm.has_draft_kv()
    assert algorithm.create_worker(SimpleNamespace(disable_overlap_schedule=False)) is HierarchyWorker


def test_the_algorithm_answers_all_that_sglang_asks_of_its_own() -> None:
    algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
    for name in vars(SpeculativeAlgorithm):
        if name.startswith(("is_", "supports_", "need_", "carries_", "has_")):
            own = getattr(algorithm, name)()
            assert own == getattr(SpeculativeAlgorithm.NGRAM, name)(), name
    assert callable(algorithm.create_future_map)


def test_options_of_sglangs_corpus_are_refused() -> None:
    options = SimpleNamespace(speculative_ngram_external_corpus_path="corpus.jsonl")
    with pytest.raises(OptionError, match="external-corpus-path"):
        SpeculativeAlgorithm.from_string(ALGORITHM).validate_server_args(options)


def options(**changed: Any) -> Any:
    """Options of a server as they are before algorithms fill them in."""
    given = dict.fromkeys(("max_running_requests", "speculative_num_draft_tokens", "speculative_num_steps"))
    known = {"device": "cuda", "speculative_ngram_max_bfs_breadth": 10, "page_size": 1, "attention_backend": None}
    flags = {"enable_dp_attention": False, "disable_overlap_schedule": False}
    return SimpleNamespace(**{**given, **known, **flags, **changed})


def test_options_are_filled_in_as_those_of_ngram() -> None:
    algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
    filled = options()
    algorithm.handle_server_args(filled)
    assert (filled.speculative_num_draft_tokens, filled.max_running_requests) == (12, 48)
    assert not filled.disable_overlap_schedule
    with pytest.raises(OptionError, match="flashinfer"):
        algorithm.handle_server_args(options(page_size=16))


def test_drafters_open_the_stores_of_the_model() -> None:
    place = {"model_path": str(demo.MODEL), "tokenizer_path": None, "served_model_name": None}
    make = drafters_of(SimpleNamespace(**place, trust_remote_code=False, revision=None), NODES)
    first, second = make(), make()
    assert isinstance(first, Hierarchy) and isinstance(second, Hierarchy)
    assert first._stores[0] is not None and first._stores[1] is not None
    assert first._stores == second._stores and first._history is second._history is not None


def test_answers_equal_plain_decoding_and_later_ones_take_fewer_passes() -> None:
    one = worker(History())
    prompts = [[5, 9, 2], [4, 4, 1], [20, 3, 8]]
    passes = []
    for epoch in range(2):
        requests = [Request(f"{epoch}-{place}", prompt) for place, prompt in enumerate(prompts)]
        passes.append(answer(one, requests))
        assert [request.output_ids.tolist() for request in requests] == [plain(prompt) for prompt in prompts]
    assert passes[1] < passes[0] < LENGTH
    assert not one._running
