"""Finds damaged weights by their values, so that a damaged file is not mistaken for an unsupported model.

A damaged scale of a quantized block, or a damaged exponent of another number, gives NaN, infinite or huge values. A
download that was interrupted may end in zeros.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import torch

from hdtool.data.errors import ModelError
from hdtool.data.stores.home import home
from hdtool.runtime.kernels.compact_weight import expand_compact

LARGEST = torch.finfo(torch.float16).max
"""Magnitude that weights of trained models stay far below: they are also published in float16."""


class WeightCheck:
    """Checks the weights of one file or checkpoint while they are converted."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._unlikely: list[str] = []

    def refuse_damaged(self, name: str, weight: torch.Tensor) -> None:
        """Raise a ``ModelError`` if a weight has values that are not finite."""
        if (size := _magnitude(weight)) is None:
            return
        if not math.isfinite(size):
            raise ModelError(f"{self._source} is damaged: {name} holds {_in_words(size)}: get it again")
        is_placeholder = 0 in weight.stride()  # an expanded zero in place of a weight that stays packed
        if size > LARGEST or (size == 0 and weight.dim() > 1 and not is_placeholder):
            self._unlikely.append(f"{name} holds {_in_words(size)}")

    def finish(self, weights: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Check the remaining weights, and then print a note if any weight had finite but unlikely values."""
        for name, weight in weights:
            self.refuse_damaged(name, weight)
        if self._unlikely:
            more = f", and {len(self._unlikely) - 1} more are as unlikely" if len(self._unlikely) > 1 else ""
            found = f"{self._source} may be damaged: {self._unlikely[0]}{more}"
            print(f"note: {found}: get it again if answers make no sense", file=sys.stderr)


def refuse_damaged_model(model: torch.nn.Module) -> None:
    """Raise a ``ModelError`` if a model, which failed its proof, has a damaged weight."""
    for name, weight in model.named_parameters():
        size = _magnitude(expand_compact(weight))
        if size is not None and not size <= LARGEST:
            place = str(getattr(model, "name_or_path", "")) or "this model"
            advice = "remove it, and its source is read again" if place.startswith(str(home())) else "get it again"
            raise ModelError(f"{place} is damaged: {name} holds {_in_words(size)}: {advice}")


def _magnitude(weight: torch.Tensor) -> float | None:
    """Return the largest magnitude of a weight's values, NaN if any is NaN.

    Return None for weights without values of their own: integers, and those that a library quantized or sharded.
    """
    values = weight.detach()
    if type(values) is not torch.Tensor or not values.is_floating_point() or not values.numel() or values.is_meta:
        return None
    # 8-bit formats have no minimum in torch.
    lowest, highest = (values if values.itemsize > 1 else values.float()).aminmax()
    return max(-float(lowest), float(highest))


def _in_words(magnitude: float) -> str:
    if magnitude == 0:
        return "only zeros"
    if math.isnan(magnitude):
        return "NaN"
    return "infinite values" if math.isinf(magnitude) else f"values up to {magnitude:.2g}"
