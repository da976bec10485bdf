"""The proposer class that vLLM loads as its drafter."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import HdtoolError
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.integrations.vllm.cpu_fixes import repair_sampling
from hdtool.runtime.integrations.vllm.settings import Settings, tenant_among
from hdtool.runtime.model.checkpoint.identity import served_checkpoint
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.history.history import History
from hdtool.runtime.stores.store_set import StoreSet

LOGGER = logging.getLogger("vllm.hdtool")
"""vLLM prints messages of loggers below its own name."""


class HierarchyProposer:
    """hdtool's drafter in the interface of vLLM's ``custom_class``; each worker has one and opens the stores."""

    def __init__(self, vllm_config: Any) -> None:
        model, speculation = vllm_config.model_config, vllm_config.speculative_config
        try:
            settings = Settings.of(vllm_config.additional_config, speculation.num_speculative_tokens)
            named = ModelConfig(model.tokenizer, trust_remote_code=model.trust_remote_code)
            tokenizer = load_tokenizer(named, model.tokenizer_revision)
            named_model = ModelConfig(model.model, trust_remote_code=model.trust_remote_code)
            store_set = StoreSet.for_tokenizer(
                tokenizer,
                settings.store_set([model.served_model_name, model.model]),
                model=served_checkpoint(named_model, model.revision),
                identified=settings.serving.keeps_history,
            )
            if settings.serving.keeps_history:
                store_set = _with_history(store_set, settings, vllm_config)
        except HdtoolError as error:
            # A store of the user's machine may be missing on the machine of a worker.
            raise type(error)(f"{error} (on {socket.gethostname()})") from None
        self.drafter = BatchDrafter(
            store_set,
            settings.serving,
            rows=vllm_config.scheduler_config.max_num_seqs,
            longest=model.max_model_len,
            vocabulary=model.get_vocab_size(),
        )
        self._on_cpu = vllm_config.device_config.device_type == "cpu"
        LOGGER.info("hdtool drafts from %s", store_set)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Repair vLLM on CPUs; there is no draft model to load."""
        if self._on_cpu and (repaired := repair_sampling()):
            LOGGER.warning("this vLLM has defects on CPUs, repaired in this process: %s", ", ".join(repaired))

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens for each row of the batch; none for rows without sampled tokens, which are in prefill."""
        return self.drafter.draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


def _with_history(store_set: StoreSet, settings: Settings, vllm_config: Any) -> StoreSet:
    # Loads lmdb, which a history in memory does not need.
    from hdtool.runtime.integrations.vllm.lasting_history import appends, lasting_history

    model = vllm_config.model_config
    tenant = tenant_among([model.served_model_name], model.model) if settings.tenant is None else settings.tenant
    read_only = not appends(vllm_config.parallel_config)
    store = lasting_history(settings.serving.history, store_set, model.model, tenant, read_only=read_only)
    LOGGER.info("hdtool %s answers in %s", "reads" if read_only else "keeps", store.folder)
    return replace(store_set, history=History(store=store))
