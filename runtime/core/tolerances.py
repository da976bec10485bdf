"""Tolerances for rounding: how far results of the same computation may differ, and how this is measured."""

from __future__ import annotations

import torch

HIGH_PRECISION_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.1
"""Maximum distance between the logits of a tree and those of plain decoding, in standard deviations of the latter.

If a model ignores masks or positions, its logits differ by tenths of a standard deviation at most nodes. Rounding to
bfloat16 changes them by a few hundredths.
"""
STRICT_TOLERANCE = 3e-4
"""Maximum distance of float32 logits from the expected ones, in standard deviations, for chains and recurrences.

Logits of correct passes differ by 1e-5 for most models, and by 2e-4 for a few. A recurrence carries errors from step to
step, and in some layers an error of 1e-3 changes tokens.
"""


def tolerance_of(dtype: torch.dtype, *, strict: bool = False) -> float:
    """Return the maximum distance, in standard deviations, that rounding to a dtype can explain.

    ``strict`` selects ``STRICT_TOLERANCE`` for float32 and float64.
    """
    if is_low_precision(dtype):
        return LOW_PRECISION_TOLERANCE
    return STRICT_TOLERANCE if strict else HIGH_PRECISION_TOLERANCE


def aggregate_distance(each: torch.Tensor, *, is_rounded: bool) -> float:
    """Return the largest of several rows' distances or, if ``is_rounded``, their median.

    In low precision, a mixture of experts may route a single token to another expert and still be correct.
    """
    return float(each.median() if is_rounded else each.max())


def is_low_precision(dtype: torch.dtype) -> bool:
    return dtype not in (torch.float32, torch.float64)


def distances(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each row's root mean square distance from the expected logits, in standard deviations of the latter.

    The maximum would grow with the vocabulary: with 32,000 tokens, the logits of some token differ by a tenth of a
    standard deviation even between correct passes.
    """
    scale = expected.float().std(dim=-1).clamp_min(1e-12)
    return (actual.float() - expected.float()).square().mean(dim=-1).sqrt() / scale
