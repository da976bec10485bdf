"""Opens hdtool's drafter in a worker of vLLM, from vLLM's configuration."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hdtool.data.errors import HdtoolError
from hdtool.runtime.config import ModelConfig, VllmConfig
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.integrations.vllm.settings import Settings, tenant_among
from hdtool.runtime.model.checkpoint.identity import served_checkpoint
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.history.history import History
from hdtool.runtime.stores.store_set import StoreSet

LOGGER = logging.getLogger("vllm.hdtool")
"""vLLM prints messages of loggers below its own name."""


def open_drafter(vllm_config: Any, adapt: Callable[[VllmConfig], VllmConfig] = lambda serving: serving) -> BatchDrafter:
    """The drafter of one worker, which opens the stores; ``adapt`` changes its settings to those of a runner."""
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
    LOGGER.info("hdtool drafts from %s", store_set)
    return BatchDrafter(
        store_set,
        adapt(settings.serving),
        rows=vllm_config.scheduler_config.max_num_seqs,
        longest=model.max_model_len,
        vocabulary=model.get_vocab_size(),
    )


def _with_history(store_set: StoreSet, settings: Settings, vllm_config: Any) -> StoreSet:
    # Loads lmdb, which a history in memory does not need.
    from hdtool.runtime.integrations.vllm.lasting_history import appends, lasting_history

    model = vllm_config.model_config
    tenant = tenant_among([model.served_model_name], model.model) if settings.tenant is None else settings.tenant
    read_only = not appends(vllm_config.parallel_config)
    store = lasting_history(settings.serving.history, store_set, model.model, tenant, read_only=read_only)
    LOGGER.info("hdtool %s answers in %s", "reads" if read_only else "keeps", store.folder)
    return replace(store_set, history=History(store=store))
