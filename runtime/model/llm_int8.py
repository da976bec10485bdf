"""LLM.int8() (Dettmers et al., 2022) row by row, so that drafts do not affect the rounding of other tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module


class RowByRow:
    """Makes the 8-bit layers of bitsandbytes compute each row of a pass as if it were alone.

    LLM.int8() multiplies an input column in higher precision if any row of the pass has an outlier there, so drafts
    would affect the rounding of other rows. A row alone has only its own outliers in higher precision. So outliers
    are removed before the layer, and their contribution is added to its output.
    """

    def __init__(self, model: Module) -> None:
        self.layers = [layer for layer in model.modules() if _looks_for_outliers(layer)]
        self._on = False
        self._taken_out: torch.Tensor | None = None
        self._hooks = [layer.register_forward_pre_hook(self._take_out) for layer in self.layers]
        self._hooks += [layer.register_forward_hook(self._put_back) for layer in self.layers]

    @property
    def reason(self) -> str:
        """Why steps cannot be captured, if the model has such layers."""
        return "its 8-bit layers look for outliers in each pass" if self.layers else ""

    def release(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Enable it within the context; outside, as for prompts, layers compute as in ``generate``."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _take_out(self, layer: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        self._taken_out = None
        rows = given[0]
        if not self._on or rows.numel() == rows.shape[-1]:
            return None
        outliers = rows.to(torch.float16).abs() >= layer.state.threshold  # the criterion of the layer itself
        if not outliers.any():
            return None
        self._taken_out = rows.masked_fill(~outliers, 0)
        return (rows.masked_fill(outliers, 0),)

    def _put_back(self, layer: Any, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor | None:
        if self._taken_out is None:
            return None
        outliers, self._taken_out = self._taken_out.flatten(0, -2), None
        columns = outliers.any(dim=0).nonzero()[:, 0]
        weights = (layer.state.CB[:, columns].float() * layer.state.SCB[:, None] * (1 / 127)).to(result.dtype)
        return torch.addmm(result.flatten(0, -2), outliers[:, columns], weights.t()).view_as(result)


def _looks_for_outliers(layer: Any) -> bool:
    library = sys.modules.get("bitsandbytes")  # loaded if the model has such layers
    return library is not None and isinstance(layer, library.nn.Linear8bitLt) and layer.state.threshold > 0
