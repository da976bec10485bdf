"""SGLang's own registry, plug-in loader and n-gram worker with hdtool's trees; the model is a function."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.ngram_worker import _derive_tree_links
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.sglang_algorithm import HierarchyAlgorithm
from hdtool.runtime.integrations.sglang_corpus import HierarchyCorpus
from hdtool.runtime.integrations.sglang_plugin import ALGORITHM, LOGGER
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


def resolved(*options: str) -> Any:
    """A server's options for the demo's model on a CPU, resolved by SGLang."""
    load_plugins()
    words = ["--model-path", str(demo.MODEL), "--device", "cpu", "--speculative-algorithm", ALGORITHM, *options]
    args = prepare_server_args(words)
    args.resolve_once()
    return args


def test_sglang_takes_the_options_that_the_algorithm_fills_in() -> None:
    view = resolving_view(resolved())
    assert (view.speculative_num_draft_tokens, view.max_running_requests) == (12, 48)
    assert view.disable_overlap_schedule, "as SGLang's NGRAM does on a CPU"
    with pytest.raises(OptionError, match="flashinfer"):
        resolved("--page-size", "16")


def test_sglangs_constructor_makes_a_worker_that_drafts_from_the_stores(caplog: pytest.LogCaptureFixture) -> None:
    """The model is a stand-in; SGLang compiles its own corpus, which is dropped."""
    args = resolved("--speculative-num-draft-tokens", str(NODES))
    publish(args, role="scheduler")
    runner, config = SimpleNamespace(max_running_requests=4), SimpleNamespace(vocab_size=4096)
    LOGGER.addHandler(caplog.handler)  # SGLang's logger does not propagate
    one = HierarchyWorker(args, 0, 0, SimpleNamespace(model_runner=runner, model_config=config))
    LOGGER.removeHandler(caplog.handler)
    assert "experimental" in caplog.text
    assert (one.enable_overlap, one.draft_token_num) == (False, NODES)
    first, second = one.ngram_corpus._make(), one.ngram_corpus._make()
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
