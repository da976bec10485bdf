"""Repairs two defects of vLLM's CPU build that break sampling with any drafter, vLLM's own included.

Temperature, top-k and top-p of draft tokens are read from uninitialized memory, because they are written to a copy.
And a batch without draft tokens crashes the engine if a request samples with top-k. Each defect is tested for, so a
build without it is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PROBE = (0.25, 3.0, 0.5)


def repair_sampling() -> list[str]:
    """Replace the defective functions of vLLM in this process; return the names of the repairs."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    found = []
    if not _expands(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = expanded
        found.append("sampling settings of drafted tokens")
    if not _accepts_empty_batch(topk_topp_sampler.apply_top_k_only):
        topk_topp_sampler.apply_top_k_only = with_rows_only(topk_topp_sampler.apply_top_k_only)
        found.append("top-k of a batch without drafts")
    return found


def expanded(
    settings: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat each request's setting for each of its draft tokens; ``ends`` are cumulative counts."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    repeated = settings.repeat_interleave(counts, output_size=tokens)
    return repeated.masked_fill(repeated == replace_from, replace_to)


def with_rows_only(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function so that it is called only for logits with at least one row."""

    def apply_to_rows(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply(logits, k) if len(logits) else logits

    return apply_to_rows


def _expands(expand: Callable[..., Any]) -> bool:
    settings, ends = torch.tensor(PROBE), torch.tensor([1, 1, 4], dtype=torch.int32)
    # Uninitialized memory may hold the right numbers by chance, but not twice.
    return all(
        expand(factor * settings, ends, 4, 0, 1).tolist() == [factor * PROBE[0], *[factor * PROBE[2]] * 3]
        for factor in (1.0, 2.0)
    )


def _accepts_empty_batch(apply: Callable[..., Any]) -> bool:
    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True
