"""SGLang's own registry, plug-in loader and n-gram worker with hdtool's trees; the model is a function."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative import eagle_utils, ngram_worker
from sglang.srt.speculative.ngram_worker import _derive_tree_links
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.sglang.algorithm import HierarchyAlgorithm
from hdtool.runtime.integrations.sglang.ngram_corpus import HierarchyCorpus, PayingNodes
from hdtool.runtime.integrations.sglang.plugin import ALGORITHM, LOGGER
from hdtool.runtime.integrations.sglang.worker import HierarchyWorker
from hdtool.runtime.stores.history_store import History

NODES, LENGTH, VOCABULARY = 8, 40, 23


class Request:
    def __init__(self, rid: str, prompt: list[int]) -> None:
        self.rid, self.origin_input_ids_unpadded, self.output_ids = rid, array("q", prompt), array("q")


def following(context: list[int]) -> int:
    """A model: the next token depends on the last two, and repeats after a while."""
    return (context[-1] * 7 + context[-2] * 3 + 1) % VOCABULARY


def worker(history: History | None, *, on_cpu: bool = False) -> HierarchyWorker:
    """A worker as its constructor leaves it, without a target model; by default as on a GPU."""
    made = HierarchyWorker.__new__(HierarchyWorker)
    made.enable_overlap, made.draft_token_num, made.max_trie_depth = False, NODES, NODES + 1
    made._paying = PayingNodes(NODES - 1) if on_cpu else None
    budget, set_nodes = made._paying or FixedBudget(NODES - 1), made._set_nodes if on_cpu else None
    made.ngram_corpus = HierarchyCorpus(lambda: Hierarchy(budget=budget, history=history), NODES, VOCABULARY, set_nodes)
    made._running = WeakValueDictionary()
    return made


class Model:
    """The target's worker and model runner: the logits of each node follow from its context."""

    def __init__(self) -> None:
        self.model_runner, self.model_config = self, SimpleNamespace(hf_config=None, vocab_size=VOCABULARY)
        self.watermark_state = None
        self.widths: list[int] = []

    def forward_batch_generation(self, batch: Any, **options: Any) -> Any:
        tree, logits = batch.spec_info, torch.zeros(len(batch.input_ids), VOCABULARY)
        nodes = tree.draft_token_num
        self.widths.append(nodes)
        masks = tree.custom_mask.reshape(len(batch.reqs), nodes, nodes)
        for row, request in enumerate(batch.reqs):
            drafted = batch.input_ids[row * nodes : (row + 1) * nodes]
            for node in range(nodes):
                path = [
                    *request.origin_input_ids_unpadded,
                    *request.output_ids[:-1],
                    *drafted[masks[row, node]].tolist(),
                ]
                logits[row * nodes + node, following(path)] = 1.0
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits), can_run_cuda_graph=False)


def reconstruct(mask: Any, lengths: Any, positions: Any, index: Any, children: Any, siblings: Any, *sizes: int) -> None:
    """The kernel that lists a tree's nodes."""
    links = _derive_tree_links(mask.numpy(), *sizes)
    for written, read in zip((children, siblings), links, strict=True):
        written.copy_(read)
    index.copy_(torch.arange(index.numel()).reshape(index.shape))


def walk(*, predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, **links: Any) -> tuple[Any, ...]:
    """The kernel that accepts drafts by arg-max."""
    for row, target in enumerate(links["target_predict"]):
        node = accepted = 0
        while node >= 0:
            place = links["retrieve_index"][row, node]
            accept_index[row, accepted], predicts[place] = place, target[node]
            last, node = node, int(links["retrieve_next_token"][row, node])
            while node >= 0 and candidates[row, node] != target[last]:
                node = int(links["retrieve_next_sibling"][row, node])
            accepted += 1
        accept_token_num[row] = accepted - 1
    return predicts, accept_index, accept_token_num


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the compiled kernels of a step; nothing is moved in a KV cache."""
    publish(resolved(), role="scheduler")
    monkeypatch.setattr(ngram_worker, "reconstruct_indices_from_tree_mask_func", reconstruct)
    monkeypatch.setattr(ngram_worker, "assign_extend_cache_locs_func", lambda **told: None)
    monkeypatch.setattr(ngram_worker, "move_accept_tokens_to_target_kvcache", lambda *told: None)
    monkeypatch.setattr(ngram_worker, "commit_mamba_states_after_verify", lambda *told: None)
    monkeypatch.setattr(eagle_utils, "verify_tree_greedy_func", lambda topk, **told: walk(**told))


def batch_of(requests: list[Request]) -> Any:
    """A batch of SGLang's that decodes, with what a worker reads from it."""
    lengths = [len(request.origin_input_ids_unpadded) + len(request.output_ids) - 1 for request in requests]
    penalties = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
    return SimpleNamespace(
        reqs=requests, spec_info=None, device="cpu", forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths), req_pool_indices=torch.arange(len(requests)), input_ids=None,
        out_cache_loc=None, req_to_token_pool=SimpleNamespace(req_to_token=None), has_grammar=False,
        return_logprob=False, grammar_needs_sync=lambda: False,
        sampling_info=SimpleNamespace(is_all_greedy=True, has_watermark_candidates=False, **penalties),
    )  # fmt: skip


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


def test_on_a_cpu_trees_have_the_size_that_pays(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's whole step runs; as nodes cost more, trees shrink to their roots."""
    one, model, floor = worker(None, on_cpu=True), Model(), 0.0
    one._target_worker = one.model_runner = model
    one.device, one.max_batch_size, one.token_to_kv_pool_allocator, one._prev_decode_rids = "cpu", 4, None, set()
    one.speculative_num_draft_tokens = NODES
    one._init_preallocated_tensors()
    monkeypatch.setattr(one._paying.passes, "floor", lambda requests: floor)  # type: ignore[union-attr]
    observed = list[tuple[int, int, int]]()
    monkeypatch.setattr(one._paying.passes, "observe", lambda *told: observed.append(told[:3]))  # type: ignore[union-attr]
    prompts = [[5, 9, 2], [4, 4, 1], [20, 3, 8]]
    requests = [Request(str(place), prompt) for place, prompt in enumerate(prompts)]
    for request in requests:
        request.output_ids.append(following(list(request.origin_input_ids_unpadded)))
    while running := [request for request in requests if len(request.output_ids) < LENGTH]:
        floor = NO_DRAFT_ABOVE if len(model.widths) % 4 == 3 else 0.0
        result = one.forward_batch_generation(batch_of(running))
        nodes = result.speculative_num_draft_tokens
        assert result.next_token_ids.numel() == nodes * len(running)
        emitted = result.next_token_ids.reshape(-1, nodes).tolist()
        assert observed[-1] == (len(running), nodes * len(running), int(result.accept_lens.sum()))
        for request, tokens, accepted in zip(running, emitted, result.accept_lens.tolist(), strict=True):
            request.output_ids.extend(tokens[:accepted])
    assert [request.output_ids.tolist()[:LENGTH] for request in requests] == [plain(prompt) for prompt in prompts]
    assert set(model.widths[3::4]) == {1} and max(model.widths) > 2
    assert len(model.widths) < LENGTH
