"""Finds damaged weights by their values, so that a damaged file is not mistaken for an unsupported model.

A damaged scale of a quantized block, or a damaged exponent of another number, gives NaN, infinite or huge values. A
download that was interrupted may end in zeros.
"""

from __future__ import annotations

import math

import torch

from hdtool.data.errors import ModelError
from hdtool.data.home import home
from hdtool.data.notes import note
from hdtool.runtime.kernels.compact_weight import expand_compact, is_compact
from hdtool.runtime.kernels.packed_matrix import MXFP4, PackedExperts, PackedMatrix

LARGEST = torch.finfo(torch.float16).max
"""Largest plausible magnitude: trained models' weights stay far below it, as they are also published in float16."""


SCALES = {
    "Q4_0": ((0, 8),), "Q4_1": ((0, 15), (2, 1)), "Q5_0": ((0, 16),), "Q5_1": ((0, 31), (2, 1)), "Q8_0": ((0, 128),),
    "Q4_K": ((0, 63 * 15), (2, 63)), "Q5_K": ((0, 63 * 31), (2, 63)), "Q6_K": ((208, 128 * 32),), "IQ4_NL": ((0, 127),),
}  # fmt: skip
"""For each block format, pairs of the offset of a float16 scale in a block and the largest factor of this scale."""
MXFP4_LARGEST, EXPONENT_BIAS, NAN_EXPONENT = 6, 127, 255


class WeightCheck:
    """Checks the weights of one file or checkpoint while they are read."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._unlikely: list[str] = []

    def refuse_damaged(self, name: str, weight: torch.Tensor) -> None:
        """Raise a ``ModelError`` if a weight has non-finite values; remember an unlikely weight for ``finish``."""
        if (size := _magnitude(weight)) is None:
            return
        if not math.isfinite(size):
            raise ModelError(f"{self._source} is damaged: {name} holds {_in_words(size)}: get it again")
        if size > LARGEST or (size == 0 and weight.dim() > 1):
            self._unlikely.append(f"{name} holds {_in_words(size)}")

    def finish(self) -> None:
        """Print a note if any weight had finite but unlikely values."""
        if self._unlikely:
            more = f", and {len(self._unlikely) - 1} more are as unlikely" if len(self._unlikely) > 1 else ""
            found = f"{self._source} may be damaged: {self._unlikely[0]}{more}"
            note(f"{found}: get it again if answers make no sense")


def refuse_damaged_model(model: torch.nn.Module) -> None:
    """Raise a ``ModelError`` if a weight of a model has non-finite values, or values above ``LARGEST``."""
    for name, weight in model.named_parameters():
        size = _magnitude(expand_compact(weight))
        if size is not None and not size <= LARGEST:
            place = str(getattr(model, "name_or_path", "")) or "this model"
            advice = "remove it, and its source is read again" if place.startswith(str(home())) else "get it again"
            raise ModelError(f"{place} is damaged: {name} holds {_in_words(size)}: {advice}")


def _magnitude(weight: torch.Tensor) -> float | None:
    """Return the largest magnitude of a weight's values (for packed blocks, a bound on it); NaN if any value is NaN.

    Return None for weights without values of their own: integers, and those that a library quantized or sharded.
    """
    if is_compact(weight) and isinstance(stored := weight.stored, PackedMatrix):
        parts = stored.parts if isinstance(stored, PackedExperts) else [stored]
        return max(map(_magnitude_of_blocks, parts))
    values = expand_compact(weight).detach()
    if type(values) is not torch.Tensor or not values.is_floating_point() or not values.numel() or values.is_meta:
        return None
    # 8-bit formats have no minimum in torch.
    lowest, highest = (values if values.itemsize > 1 else values.float()).aminmax()
    return max(-float(lowest), float(highest))


def _magnitude_of_blocks(matrix: PackedMatrix) -> float:
    """Return an upper bound on the magnitudes in quantized blocks, from their scales; NaN if any scale is NaN."""
    blocks = matrix.blocks.view(-1, matrix.format.bytes)
    if matrix.format.name == MXFP4.name:
        exponent = int(blocks[:, 0].max())
        return math.nan if exponent == NAN_EXPONENT else MXFP4_LARGEST * 2.0 ** (exponent - EXPONENT_BIAS)
    largest = 0.0
    for offset, factor in SCALES[matrix.format.name]:
        lowest, highest = map(float, blocks.view(torch.float16)[:, offset // 2].float().aminmax())
        if math.isnan(lowest):
            return math.nan
        largest += factor * max(-lowest, highest)
    return largest


def _in_words(magnitude: float) -> str:
    if magnitude == 0:
        return "only zeros"
    if math.isnan(magnitude):
        return "NaN"
    return "infinite values" if math.isinf(magnitude) else f"values up to {magnitude:.2g}"
