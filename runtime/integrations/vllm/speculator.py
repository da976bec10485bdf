"""Implements the drafter interfaces of vLLM's V1 and V2 model runners, and repairs defects of vLLM on CPUs.

V2 keeps the tokens of each request on the device, in a slot that the request keeps until its end, and it verifies
equally many drafts for every request. So each step waits for the pass and copies the latest tokens of the batch to the
host. Shorter drafts are padded with a token, which the model rejects unless it would have sampled this token.

Two functions of vLLM are replaced if a probe finds them defective: one leaves the sampling settings of draft tokens
uninitialized, the other crashes on top-k in a batch without draft tokens.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import HdtoolError, OptionError
from hdtool.data.stores.tenant import Tenant
from hdtool.runtime.config.measuring import VllmConfig
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.integrations.vllm.answer_collector import appends_history
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.integrations.vllm.min_probability import MIN_FLOOR
from hdtool.runtime.integrations.vllm.settings import VllmSettings
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.library import Library
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import served_checkpoint

PROBE_SETTINGS = (0.25, 3.0, 0.5)


def repair_sampling() -> list[str]:
    """Replace defective functions of vLLM in this process; return the names of the repairs made, if any."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    repairs = []
    if not _expands(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = expand_settings
        repairs.append("sampling settings of drafted tokens")
    if not _accepts_empty_batch(topk_topp_sampler.apply_top_k_only):
        topk_topp_sampler.apply_top_k_only = with_rows_only(topk_topp_sampler.apply_top_k_only)
        repairs.append("top-k of a batch without drafts")
    return repairs


def expand_settings(
    settings: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat each request's setting for each of its draft tokens, replacing ``replace_from`` with ``replace_to``.

    ``ends`` holds the cumulative numbers of draft tokens, and ``tokens`` is their total.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    repeated = settings.repeat_interleave(counts, output_size=tokens)
    return repeated.masked_fill(repeated == replace_from, replace_to)


def with_rows_only(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function so that it is only called for logits with at least one row; empty ones are returned unchanged."""

    def apply_to_rows(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply(logits, k) if len(logits) else logits

    return apply_to_rows


def _expands(expand: Callable[..., Any]) -> bool:
    settings, ends = torch.tensor(PROBE_SETTINGS), torch.tensor([1, 1, 4], dtype=torch.int32)
    # Uninitialized memory may contain the right numbers by chance, but not twice.
    return all(
        expand(factor * settings, ends, 4, 0, 1).tolist()
        == [factor * PROBE_SETTINGS[0], *[factor * PROBE_SETTINGS[2]] * 3]
        for factor in (1.0, 2.0)
    )


def _accepts_empty_batch(apply: Callable[..., Any]) -> bool:
    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True


LOGGER = logging.getLogger("vllm.hdtool")
"""Logger below vLLM's own, so that vLLM prints its messages."""


def open_drafter(vllm_config: Any, adapt: Callable[[VllmConfig], VllmConfig] = lambda serving: serving) -> BatchDrafter:
    """Open the stores and return the drafter of one worker; ``adapt`` changes the settings to suit a runner.

    The message of an error names the machine of the worker.
    """
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    try:
        settings = VllmSettings.of(vllm_config.additional_config, speculation.num_speculative_tokens)
        named = ModelConfig(model.tokenizer, trust_remote_code=model.trust_remote_code)
        tokenizer = load_tokenizer(named, model.tokenizer_revision)
        named_model = ModelConfig(model.model, trust_remote_code=model.trust_remote_code)
        checkpoint = served_checkpoint(named_model, model.revision)
        tenant = Tenant.served([model.served_model_name], model.model, settings.tenant)
        library = Library(model.model, tokenizer, checkpoint, settings.stores, tenant)
        store_set = library.open()
        if settings.serving.keeps_history:
            read_only = not appends_history(vllm_config.parallel_config)
            store = library.open_history(settings.serving.history, store_set, read_only=read_only)
            LOGGER.info("hdtool %s answers in %s", "reads" if read_only else "keeps", store.folder)
            store_set = replace(store_set, history=History(store=store))
    except HdtoolError as error:
        # A store on the user's machine may be missing on the worker's machine.
        raise type(error)(f"{error} (on {socket.gethostname()})") from None
    LOGGER.info("hdtool drafts from %s", store_set)
    return BatchDrafter(
        store_set,
        adapt(settings.serving),
        rows=vllm_config.scheduler_config.max_num_seqs,
        max_length=model.max_model_len,
        vocabulary=model.get_vocab_size(),
    )


class HierarchyProposer:
    """A ``custom_class`` drafter for vLLM's V1 runner; each worker has one."""

    def __init__(self, vllm_config: Any) -> None:
        self.drafter = open_drafter(vllm_config)
        self._on_cpu = vllm_config.device_config.device_type == "cpu"

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """On a CPU, replace defective functions of vLLM; there is no draft model to load."""
        if self._on_cpu and (repaired := repair_sampling()):
            LOGGER.warning("this vLLM has defects on CPUs, repaired in this process: %s", ", ".join(repaired))

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for each row of the batch; none for rows without sampled tokens, which are in prefill."""
        return self.drafter.draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


class HierarchySpeculator:
    """A speculator for vLLM's V2 runner; it doesn't inherit from ``BaseSpeculator``, so that tests don't need vLLM."""

    num_query_per_req, num_extra_query_per_req = 1, 0
    supports_mm_inputs = False
    draft_logits = None
    """None makes the rejection sampler treat drafts as certain, which preserves the distribution."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise OptionError("--prefill-context-parallel-size is above 1: hdtool's drafter needs whole prompts")
        self.drafter = open_drafter(vllm_config, without_min_prob)
        self._device, self._states = device, req_states
        self._num_drafts = vllm_config.speculative_config.num_speculative_tokens
        self._slots = TokenSlots(vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no draft model to capture."""

    def capture(self) -> None:
        """Do nothing: there is no draft model to capture."""

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
        """Return draft tokens ``[rows, num_speculative_tokens]`` for the batch; shorter drafts are padded."""
        rows = input_batch.num_reqs
        if dummy_run:
            return torch.zeros((rows, self._num_drafts), dtype=torch.int64, device=self._device)
        latest = latest_tokens(self._states, input_batch.idx_mapping[:rows], num_sampled[:rows], self._num_drafts + 1)
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
        drafted = self.drafter.draft(counts, self._slots.lengths, self._slots.tokens)
        drafts = np.repeat(last.astype(np.int64)[:, None], self._num_drafts, axis=1)
        for row, slot in enumerate(slots.tolist()):
            drafts[row, : len(drafted[slot])] = drafted[slot]
        return drafts


class TokenSlots:
    """Host copy of the tokens of running requests, in the same slots as in vLLM."""

    def __init__(self, slots: int, max_length: int) -> None:
        # Takes no memory for pages that are never written.
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.lengths = np.zeros(slots, np.int32)
        self._owners = [""] * slots

    def extend(self, slot: int, request: str, length: int, latest: npt.NDArray[np.int32]) -> bool:
        """Extend a slot to ``length`` with the ``latest`` tokens of a request; return False if these do not suffice."""
        known = int(self.lengths[slot]) if self._owners[slot] == request else 0
        missing = length - known
        if not known or not 0 <= missing <= len(latest):
            return False
        self.tokens[slot, known:length] = latest[len(latest) - missing :]
        self.lengths[slot] = length
        return True

    def put(self, slot: int, request: str, tokens: npt.NDArray[np.int32]) -> None:
        """Replace the contents of a slot with the tokens of a request."""
        self.tokens[slot, : len(tokens)], self.lengths[slot], self._owners[slot] = tokens, len(tokens), request


def latest_tokens(states: Any, slots: torch.Tensor, sampled: torch.Tensor, max_tokens: int) -> npt.NDArray[np.int32]:
    """Copy the latest tokens of each row to the host, in one transfer.

    Each row of the result has the number of sampled tokens, the length, and the last ``max_tokens`` tokens.
    """
    lengths = states.total_len.gpu[slots]
    positions = lengths[:, None] - torch.arange(max_tokens, 0, -1, device=lengths.device)
    tokens = states.all_token_ids.gpu[slots[:, None], positions.clamp(min=0)]
    latest: npt.NDArray[np.int32] = torch.cat([sampled[:, None], lengths[:, None], tokens], 1).int().cpu().numpy()
    return latest


def without_min_prob(serving: VllmConfig) -> VllmConfig:
    """Set the minimum draft probability to ``MIN_FLOOR`` unless the user has set one.

    V2 verifies equally many drafts for every request, so even an improbable draft is better than padding.
    """
    return serving if serving.min_draft_prob is not None else replace(serving, min_draft_prob=MIN_FLOOR)
