"""hdtool's drafter in the interface of vLLM's Model Runner V2, which calls it with tensors on the device.

V2 keeps the tokens of each request on the device, in a slot that the request has until its end, and verifies the same
number of drafts for every request. So each step copies the latest tokens of the batch to the host, which waits for the
pass, and fills up shorter drafts with a token that the model refuses unless it would have sampled it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import OptionError
from hdtool.runtime.config import VllmConfig
from hdtool.runtime.integrations.vllm.min_probability import LOWEST
from hdtool.runtime.integrations.vllm.worker import open_drafter


class HierarchySpeculator:
    """A ``BaseSpeculator`` of vLLM, though not by inheritance, so that it can be tested without vLLM."""

    num_query_per_req, num_extra_query_per_req = 1, 0
    supports_mm_inputs = False
    draft_logits = None
    """The rejection sampler takes drafts without logits as certain ones, which keeps the distribution."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise OptionError("--prefill-context-parallel-size is above 1: hdtool's drafter needs whole prompts")
        self.drafter = open_drafter(vllm_config, send_all)
        self._device, self._states = device, req_states
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._slots = TokenSlots(vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft tokens for each row of the batch, as many as vLLM verifies at most."""
        rows = input_batch.num_reqs
        if dummy_run:
            return torch.zeros((rows, self._most), dtype=torch.int64, device=self._device)
        latest = latest_tokens(self._states, input_batch.idx_mapping[:rows], num_sampled[:rows], self._most + 1)
        sampled, lengths = latest[:, 0], latest[:, 1]
        slots = input_batch.idx_mapping_np[:rows]
        for row, slot in enumerate(slots.tolist()):
            if not self._slots.extend(slot, input_batch.req_ids[row], int(lengths[row]), latest[row, 2:]):
                whole = self._states.all_token_ids.gpu[slot, : int(lengths[row])].cpu().numpy()
                self._slots.put(slot, input_batch.req_ids[row], whole)
        drafts = self._draft(slots, sampled, latest[:, -1])
        return torch.from_numpy(drafts).to(self._device)

    def _draft(
        self, slots: npt.NDArray[np.integer[Any]], sampled: npt.NDArray[np.int32], last: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        counts: list[range] = [range(0)] * len(self._slots.lengths)
        for slot, count in zip(slots.tolist(), sampled.tolist(), strict=True):
            counts[slot] = range(count)
        found = self.drafter.draft(counts, self._slots.lengths, self._slots.tokens)
        drafts = np.repeat(last.astype(np.int64)[:, None], self._most, axis=1)
        for row, slot in enumerate(slots.tolist()):
            drafts[row, : len(found[slot])] = found[slot]
        return drafts


class TokenSlots:
    """The tokens of the running requests on the host, in the slots of vLLM."""

    def __init__(self, slots: int, longest: int) -> None:
        # Pages that are never written take no memory.
        self.tokens = np.zeros((slots, longest), np.int32)
        self.lengths = np.zeros(slots, np.int32)
        self._owners = [""] * slots

    def extend(self, slot: int, request: str, length: int, latest: npt.NDArray[np.int32]) -> bool:
        """Bring a slot to this length by the latest tokens of its request; False if others are missing."""
        known = int(self.lengths[slot]) if self._owners[slot] == request else 0
        missing = length - known
        if not known or not 0 <= missing <= len(latest):
            return False
        self.tokens[slot, known:length] = latest[len(latest) - missing :]
        self.lengths[slot] = length
        return True

    def put(self, slot: int, request: str, tokens: npt.NDArray[np.int32]) -> None:
        """Replace the tokens of a slot by those of a request."""
        self.tokens[slot, : len(tokens)], self.lengths[slot], self._owners[slot] = tokens, len(tokens), request


def latest_tokens(states: Any, slots: torch.Tensor, sampled: torch.Tensor, most: int) -> npt.NDArray[np.int32]:
    """For each row its number of sampled tokens, its length and its last ``most`` tokens, in one copy to the host."""
    lengths = states.total_len.gpu[slots]
    places = lengths[:, None] - torch.arange(most, 0, -1, device=lengths.device)
    tokens = states.all_token_ids.gpu[slots[:, None], places.clamp(min=0)]
    latest: npt.NDArray[np.int32] = torch.cat([sampled[:, None], lengths[:, None], tokens], 1).int().cpu().numpy()
    return latest


def send_all(serving: VllmConfig) -> VllmConfig:
    """V2 verifies the same number of drafts for every request, so each probable draft is better than none."""
    return serving if serving.min_draft_prob is not None else replace(serving, min_draft_prob=LOWEST)
