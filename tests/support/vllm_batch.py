"""Batch of requests, as vLLM passes it to its drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hdtool.data import demo
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.integrations.vllm.proposer import HierarchyProposer
from hdtool.runtime.integrations.vllm.worker_settings import CUSTOM_CLASS_METHOD, PROPOSER
from hdtool.runtime.settings.decoding import MEMORY
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.stores.store_set import StoreSet

MODEL = str(demo.MODEL)
ROWS, MAX_MODEL_LENGTH, TOKENS = 8, 256, 6


class Engine:
    """Token rows as in vLLM, in which tokens of earlier requests remain after a row's length."""

    def __init__(self, drafter: BatchDrafter) -> None:
        self.drafter = drafter
        self.contexts = np.full((ROWS, MAX_MODEL_LENGTH), 7, np.int32)
        self.lengths = np.zeros(ROWS, np.int32)
        self.requests: list[list[int]] = []

    def drafts(self, ready: list[bool] | None = None) -> list[list[int]]:
        """Return the drafts after a step that sampled one token for each request that is ``ready``."""
        for row, tokens in enumerate(self.requests):
            self.contexts[row, : len(tokens)] = tokens
            self.lengths[row] = len(tokens)
        sampled = [[tokens[-1]] * ready[row] if ready else [tokens[-1]] for row, tokens in enumerate(self.requests)]
        return self.drafter.draft(sampled, self.lengths, self.contexts)


def engine(
    *requests: list[int], min_draft_prob: float | None = 0.02, store_set: StoreSet | None = None, **limits: Any
) -> Engine:
    config = VllmConfig(TOKENS, min_draft_prob, limits.pop("context_mib", 256), limits.pop("history", MEMORY))
    drafter = BatchDrafter(store_set or StoreSet(), config, **{"rows": ROWS, "max_length": MAX_MODEL_LENGTH, **limits})
    made = Engine(drafter)
    made.requests = [list(request) for request in requests]
    return made


def worker_config(
    additional: Any = None, tokenizer: str = MODEL, served: str = MODEL, *, model: str = MODEL, **parallel: int
) -> Any:
    """Return the configuration that vLLM passes to a drafter in one of its workers."""
    described = SimpleNamespace(
        tokenizer=tokenizer, tokenizer_revision=None, trust_remote_code=False, served_model_name=served, model=model,
        revision=None, max_model_len=256, get_vocab_size=lambda: 4096,
    )  # fmt: skip
    sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"), 1)
    return SimpleNamespace(
        model_config=described,
        parallel_config=SimpleNamespace(**{"rank": 0, **sizes, **parallel}),
        speculative_config=SimpleNamespace(method=CUSTOM_CLASS_METHOD, model=PROPOSER, num_speculative_tokens=4),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        additional_config=additional or {},
        device_config=SimpleNamespace(device_type="cuda"),
    )


def worker(*arguments: Any, **options: Any) -> HierarchyProposer:
    """Create a proposer as one of vLLM's workers does."""
    return HierarchyProposer(worker_config(*arguments, **options))
