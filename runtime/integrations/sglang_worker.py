"""The worker that SGLang runs for the algorithm ``HDTOOL``; importing it loads SGLang's n-gram worker."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.speculative.ngram_worker import NGRAMWorker

from hdtool.runtime.integrations.sglang_corpus import HierarchyCorpus, drafters_of
from hdtool.runtime.integrations.sglang_plugin import ALGORITHM, LOGGER


class HierarchyWorker(NGRAMWorker):  # type: ignore[misc]  # SGLang is not installed for type checks
    """Drafts with one drafter per request; SGLang's n-gram worker, the base class, verifies the trees.

    ``HierarchyCorpus`` takes the place of the corpus that the base class makes.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        LOGGER.warning("%s is experimental: it never ran in a server of SGLang, nor on a GPU", ALGORITHM)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # SGLang passes this many last tokens to the corpus, enough to include all that a step can emit.
        self.max_trie_depth = self.draft_token_num + 1
        make = drafters_of(server_args, self.draft_token_num)
        self.ngram_corpus = HierarchyCorpus(make, self.draft_token_num, target_worker.model_config.vocab_size)
        self._running: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """End the answer of a request; called by SGLang's scheduler once the request contains its last tokens."""
        if request := self._running.pop(rid, None):
            self.ngram_corpus.finish(rid, _tokens(request))

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        for request in batch.reqs:
            self._running[request.rid] = request
            if request.rid not in self.ngram_corpus:
                # Leave the last token of the answer to batch_get, because the history's answer begins with it.
                answered = len(request.output_ids)
                self.ngram_corpus.begin(request.rid, _tokens(request)[: -1 if answered else None])
        return super()._prepare_draft_tokens(batch)


def _tokens(request: Any) -> list[int]:
    return [*request.origin_input_ids_unpadded, *request.output_ids]
