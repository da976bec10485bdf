"""The worker that SGLang runs for the algorithm ``HDTOOL``; importing it loads SGLang's n-gram worker."""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.speculative.ngram_worker import NGRAMWorker

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.integrations.sglang.ngram_corpus import HierarchyCorpus, PayingNodes, drafters_of
from hdtool.runtime.integrations.sglang.plugin import ALGORITHM, LOGGER


class HierarchyWorker(NGRAMWorker):  # type: ignore[misc]  # SGLang is not installed for type checks
    """Drafts with one drafter per request; SGLang's n-gram worker, the base class, verifies the trees.

    ``HierarchyCorpus`` takes the place of the corpus that the base class makes. On a GPU, SGLang captures graphs for
    one size of tree, so all trees have that size. On a CPU, trees have the size that pays.
    """

    draft_token_num: int
    """Nodes of each tree in the next pass, root included; the scheduler reads ``speculative_num_draft_tokens``."""
    speculative_num_draft_tokens: int

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        LOGGER.warning("%s is experimental: it never ran in a server of SGLang, nor on a GPU", ALGORITHM)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # SGLang passes this many last tokens to the corpus, enough to include all that a step can emit.
        self.max_trie_depth = self.draft_token_num + 1
        nodes, on_cpu = self.draft_token_num, str(self.device) == "cpu"
        self._paying = PayingNodes(nodes - 1) if on_cpu else None
        make = drafters_of(server_args, self._paying or FixedBudget(nodes - 1))
        vocabulary = target_worker.model_config.vocab_size
        self.ngram_corpus = HierarchyCorpus(make, nodes, vocabulary, self._set_nodes if on_cpu else None)
        self._running: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def forward_batch_generation(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """Run a pass; on a CPU, learn from its duration which nodes pay."""
        is_decode, requests = batch.forward_mode.is_decode(), len(batch.reqs)
        started = time.perf_counter()
        result = super().forward_batch_generation(batch, *arguments, **options)
        if self._paying and is_decode:
            emitted, seconds = int(result.accept_lens.sum()), time.perf_counter() - started
            self._paying.passes.observe(requests, requests * self.draft_token_num, emitted, seconds)
        return result

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """End the answer of a request; called by SGLang's scheduler once the request contains its last tokens."""
        if request := self._running.pop(rid, None):
            self.ngram_corpus.finish(rid, _tokens(request))

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        # The base class takes buffers of the trees' size before it asks for trees.
        if self._paying and batch.forward_mode.is_decode():
            self._paying.requests = len(batch.reqs)
            self._drafts = self._draft(batch)
        super()._prepare_for_speculative_decoding(batch)

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        return self._drafts if self._paying else self._draft(batch)

    def _draft(self, batch: Any) -> Any:
        for request in batch.reqs:
            self._running[request.rid] = request
            if request.rid not in self.ngram_corpus:
                # Leave the last token of the answer to batch_get, because the history's answer begins with it.
                answered = len(request.output_ids)
                self.ngram_corpus.begin(request.rid, _tokens(request)[: -1 if answered else None])
        return super()._prepare_draft_tokens(batch)

    def _set_nodes(self, nodes: int) -> None:
        if nodes != self.draft_token_num:
            self.draft_token_num = self.speculative_num_draft_tokens = nodes
            self._init_preallocated_tensors()


def _tokens(request: Any) -> list[int]:
    return [*request.origin_input_ids_unpadded, *request.output_ids]
