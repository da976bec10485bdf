"""hdtool's drafter in the interface of vLLM's V1 model runner, which passes tokens on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.integrations.vllm.cpu_fixes import repair_sampling
from hdtool.runtime.integrations.vllm.worker import LOGGER, open_drafter


class HierarchyProposer:
    """A ``custom_class`` drafter of vLLM; each worker has one."""

    def __init__(self, vllm_config: Any) -> None:
        self.drafter = open_drafter(vllm_config)
        self._on_cpu = vllm_config.device_config.device_type == "cpu"

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
