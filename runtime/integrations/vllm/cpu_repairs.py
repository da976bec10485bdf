"""Replaces two functions of vLLM that fail under speculative decoding on CPUs.

One leaves the sampling settings of draft tokens uninitialized, because its kernel's stand-in without Triton writes to a
copy; the other crashes on top-k in a batch without draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MENDED = (0, 34)
"""First version of vLLM that may have fixed both functions; the tests inside vLLM fail for a version that has."""


def repair_sampling() -> bool:
    """Replace vLLM's two functions in this process; return False, and do nothing, if its version may not need that."""
    import vllm

    if vllm.__version_tuple__[:2] >= MENDED:
        return False
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    rejection_sampler.expand_batch_to_tokens = expand_settings
    topk_topp_sampler.apply_top_k_only = with_rows_only(topk_topp_sampler.apply_top_k_only)
    return True


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
