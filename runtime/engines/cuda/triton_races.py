"""Runs the exponential race of each row with Triton kernels."""

from __future__ import annotations

import torch
import triton

from hdtool.runtime.core.race_leaders import LEADERS, place_of
from hdtool.runtime.engines.cuda import race_kernels

BLOCK = 2048
"""Tokens whose times one program computes."""
FIRST_SUM, END_OF_SUMS = place_of("certain"), place_of("highest")
SUMS = END_OF_SUMS - FIRST_SUM


def run_races(logits: torch.Tensor, best: torch.Tensor, step: torch.Tensor, races: torch.Tensor) -> None:
    """Write the outcome of each row's race into ``races``, a ``RACE`` record of int64 for each row.

    ``logits`` is ``[rows, vocabulary]``, ``best`` holds the argmax of each row, and ``step`` is the step's input,
    ``[slots, numbers]``, which says which slots draw, and how.
    """
    (rows, vocabulary), slots = logits.shape, len(step)
    blocks = triton.cdiv(vocabulary, BLOCK)
    found = torch.empty((rows, blocks * LEADERS), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, blocks, SUMS), dtype=torch.float32, device=logits.device)
    sizes = rows // slots, step.stride(0), vocabulary
    race_kernels.lead_kernel[(rows, blocks)](logits, best, step, found, *sizes, LEADERS, BLOCK)
    width = triton.next_power_of_2(blocks * LEADERS)
    race_kernels.select_kernel[(rows,)](logits, best, step, found, races, *sizes, blocks * LEADERS, LEADERS, width)
    race_kernels.weigh_kernel[(rows, blocks)](logits, step, races, sums, *sizes, LEADERS, SUMS, BLOCK)
    races.view(torch.float32)[:, FIRST_SUM:END_OF_SUMS].copy_(sums.sum(1))
