"""Two mistakes in vLLM's build for CPUs, which spoil sampling with any drafter, vLLM's own included.

Temperatures, top-k and top-p of drafted tokens are read from memory that nobody wrote, because the numbers are written
to a copy; and a batch without a single draft ends the engine where a request samples with top-k. Both are looked for,
so that a build without them is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PROBE = (0.25, 3.0, 0.5)


def repair_sampling() -> list[str]:
    """Mend what is broken in the vLLM of this process, and say what that was."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    found = []
    if not _expands(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = expanded
        found.append("sampling settings of drafted tokens")
    if not _takes_nothing(topk_topp_sampler.apply_top_k_only):
        topk_topp_sampler.apply_top_k_only = with_rows_only(topk_topp_sampler.apply_top_k_only)
        found.append("top-k of a batch without drafts")
    return found


def expanded(
    settings: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Each request's setting once for each of its drafted tokens; ``ends`` are where those of each request end."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    spread = settings.repeat_interleave(counts, output_size=tokens)
    return spread.masked_fill(spread == replace_from, replace_to)


def with_rows_only(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for logits of at least one row; of none there is nothing to do."""

    def apply_to_rows(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return apply(logits, k) if len(logits) else logits

    return apply_to_rows


def _expands(expand: Callable[..., Any]) -> bool:
    settings, ends = torch.tensor(PROBE), torch.tensor([1, 1, 4], dtype=torch.int32)
    # Memory that nobody wrote may hold the right numbers by chance, but not twice.
    return all(
        expand(factor * settings, ends, 4, 0, 1).tolist() == [factor * PROBE[0], *[factor * PROBE[2]] * 3]
        for factor in (1.0, 2.0)
    )


def _takes_nothing(apply: Callable[..., Any]) -> bool:
    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True
