"""LLM.int8() row by row: what is drafted beside a token does not decide how that token is rounded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module


class RowByRow:
    """Lets the 8-bit layers of bitsandbytes compute each row of a pass as if it were alone.

    LLM.int8() multiplies a column of its input unrounded as soon as one row of the pass has an outlier there, so the
    drafts of a tree would decide how their neighbours are rounded. Alone, a row has its own outliers unrounded and
    nothing else. So they are taken out before the layer, which then sees none, and their part is added behind it.
    """

    def __init__(self, model: Module) -> None:
        self.layers = [layer for layer in model.modules() if _looks_for_outliers(layer)]
        self._on = False
        self._taken_out: torch.Tensor | None = None
        self._hooks = [layer.register_forward_pre_hook(self._take_out) for layer in self.layers]
        self._hooks += [layer.register_forward_hook(self._put_back) for layer in self.layers]

    @property
    def reason(self) -> str:
        """Why steps cannot be recorded, if there are such layers."""
        return "its 8-bit layers look for outliers in each pass" if self.layers else ""

    def release(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Elsewhere, as for prompts, the layers are left to what ``generate`` would have of them."""
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
        outliers = rows.to(torch.float16).abs() >= layer.state.threshold  # as the layer itself finds them
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
    library = sys.modules.get("bitsandbytes")  # who has such layers has loaded it
    return library is not None and isinstance(layer, library.nn.Linear8bitLt) and layer.state.threshold > 0
