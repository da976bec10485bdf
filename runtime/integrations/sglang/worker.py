"""SGLang's n-gram worker with hdtool's trees in the place of its own corpus."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.speculative import ngram_worker

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import ModelConfig, StoresConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.integrations.sglang.corpus import HierarchyCorpus
from hdtool.runtime.integrations.sglang.settings import Settings
from hdtool.runtime.integrations.vllm.lasting_history import lasting_history
from hdtool.runtime.integrations.vllm.settings import tenant_among
from hdtool.runtime.model.checkpoint.identity import served_checkpoint
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.history.history import History
from hdtool.runtime.stores.store_set import StoreSet

LOGGER = logging.getLogger("sglang.hdtool")


class HierarchyWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Drafts with a hierarchy for each request; SGLang's part verifies the trees."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        with _without_corpus():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # What a step emits at most must fit in the tails that the corpus gets.
        self.max_trie_depth = self.draft_token_num + 1
        make = drafters_of(server_args, self.draft_token_num)
        self.ngram_corpus = HierarchyCorpus(make, self.draft_token_num, target_worker.model_config.vocab_size)
        self._running: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called by the scheduler, with the last tokens in the request."""
        if request := self._running.pop(rid, None):
            self.ngram_corpus.finish(rid, _tokens(request))

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        for request in batch.reqs:
            self._running[request.rid] = request
            if request.rid not in self.ngram_corpus:
                # At least one token is left to batch_get, as the answer of the history begins with it.
                answered = len(request.output_ids)
                self.ngram_corpus.begin(request.rid, _tokens(request)[: -1 if answered else None])
        return super()._prepare_draft_tokens(batch)


def _tokens(request: Any) -> list[int]:
    return [*request.origin_input_ids_unpadded, *request.output_ids]


@contextmanager
def _without_corpus() -> Iterator[None]:
    """Keep SGLang from compiling and allocating the corpus that is replaced."""
    own = ngram_worker.NgramCorpus
    ngram_worker.NgramCorpus = lambda **options: None
    try:
        yield
    finally:
        ngram_worker.NgramCorpus = own


def drafters_of(server_args: Any, nodes: int) -> Callable[[], Drafter]:
    """Makes drafters of trees with so many nodes, the root among them, from the stores that fit the model."""
    settings, model = Settings.of(os.environ), server_args.model_path
    decoding = settings.decoding
    named = ModelConfig(server_args.tokenizer_path or model, trust_remote_code=server_args.trust_remote_code)
    weights = ModelConfig(model, trust_remote_code=server_args.trust_remote_code)
    served_as = [server_args.served_model_name or model]
    tenant = settings.stores.namespace or tenant_among(served_as, model)
    store_set = StoreSet.for_tokenizer(
        load_tokenizer(named, server_args.revision),
        StoresConfig(settings.stores.model_db, settings.stores.corpus_db, tenant or None),
        decoding.databases,
        model=served_checkpoint(weights, server_args.revision),
        identified=decoding.keeps_history,
    )
    if "H" in decoding.drafts_from:
        store = lasting_history(decoding.history, store_set, model, tenant) if decoding.keeps_history else None
        store_set = replace(store_set, history=History(prompts=decoding.history_prompts, store=store))
    LOGGER.info("hdtool drafts from %s", store_set)
    return lambda: drafter_within(lambda: FixedBudget(nodes - 1), decoding, store_set)
