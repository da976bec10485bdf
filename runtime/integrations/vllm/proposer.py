"""hdtool's drafter for vLLM's V1 model runner, the only runner with a hook for external drafters."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import HdtoolError
from hdtool.runtime.integrations.served_model import opener_for_served
from hdtool.runtime.integrations.vllm.answer_collector import appends_history
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.integrations.vllm.cpu_repairs import repair_sampling
from hdtool.runtime.integrations.vllm.worker_settings import VllmSettings
from hdtool.runtime.stores.history_store import History

LOGGER = logging.getLogger("vllm.hdtool")
"""Logger below vLLM's own, so that vLLM prints its messages."""
COST = "custom drafters run in vLLM's V1 model runner, without asynchronous scheduling"
"""Drawbacks of using hdtool in vLLM, as a phrase for messages."""
UNPROVEN = "hdtool is experimental inside vLLM on %s: it ran on CPUs only"


def open_drafter(vllm_config: Any) -> BatchDrafter:
    """Open the stores and return the drafter of one worker; the message of an error names the worker's machine."""
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    try:
        settings = VllmSettings.of(vllm_config.additional_config, speculation.num_speculative_tokens)
        store_opener = opener_for_served(
            model.model,
            model.tokenizer,
            [model.served_model_name],
            settings.stores,
            settings.tenant,
            revision=model.revision,
            tokenizer_revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
        store_set = store_opener.open()
        if settings.serving.keeps_history:
            read_only = not appends_history(vllm_config.parallel_config)
            store = store_opener.open_history(settings.serving.history, store_set, read_only=read_only)
            LOGGER.info("hdtool %s answers in %s", "reads" if read_only else "keeps", store.folder)
            store_set = replace(store_set, history=History(store=store))
    except HdtoolError as error:
        # A store on the user's machine may be missing on the worker's machine.
        raise type(error)(f"{error} (on {socket.gethostname()})") from None
    LOGGER.info("hdtool drafts from %s", store_set)
    return BatchDrafter(
        store_set,
        settings.serving,
        rows=vllm_config.scheduler_config.max_num_seqs,
        max_length=model.max_model_len,
        vocabulary=model.get_vocab_size(),
        on_cpu=vllm_config.device_config.device_type == "cpu",
    )


class HierarchyProposer:
    """A ``custom_class`` drafter for vLLM's V1 runner; each worker has one."""

    def __init__(self, vllm_config: Any) -> None:
        LOGGER.info(COST)
        device = vllm_config.device_config.device_type
        self._on_cpu = device == "cpu"
        if not self._on_cpu:
            LOGGER.warning(UNPROVEN, device)
        self.drafter = open_drafter(vllm_config)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """On a CPU, replace defective functions of vLLM; there is no draft model to load."""
        if self._on_cpu and repair_sampling():
            LOGGER.warning("this vLLM samples wrongly on CPUs: two of its functions are replaced in this process")

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for each row of the batch; none for rows without sampled tokens, which are in prefill."""
        return self.drafter.draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
