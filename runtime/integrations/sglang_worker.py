"""The worker that SGLang runs for the algorithm ``HDTOOL``; importing it loads SGLang's n-gram worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.speculative import ngram_worker

from hdtool.runtime.integrations.sglang_corpus import HierarchyCorpus, drafters_of


class HierarchyWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]  # SGLang is not installed for type checks
    """Drafts with one drafter per request; the base class, SGLang's n-gram worker, verifies the trees."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        with _without_corpus():
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


@contextmanager
def _without_corpus() -> Iterator[None]:
    """Keep SGLang from compiling and allocating its own corpus, which ``HierarchyCorpus`` replaces."""
    original = ngram_worker.NgramCorpus
    ngram_worker.NgramCorpus = lambda **options: None
    try:
        yield
    finally:
        ngram_worker.NgramCorpus = original
